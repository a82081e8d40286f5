"""Linear weights laid out for fast matrix products: column-major on ARM, padded on CUDA."""

import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

# With fewer tokens the copy costs more than it saves; larger weights would take too much memory.
MIN_TOKENS = 2048
MAX_BYTES = 2**30


@contextmanager
def column_major_weights(module: nn.Module, tokens: int, *tables: Tensor) -> Iterator[None]:
    """Store linear weights in column-major order inside the block.

    Matrix products on ARM processors repack a weight at every call, which takes a tenth of the
    time from rows. Values and shapes stay the same. `tables` are weights of other modules that are
    multiplied too, such as a tied embedding.
    """
    changed: list[tuple[Tensor, Tensor]] = []
    try:
        if tokens >= MIN_TOKENS and platform.machine() == "aarch64":
            for weight in _weights_to_copy(module, tables):
                changed.append((weight, weight.data))
                weight.data = weight.data.T.contiguous().T
        yield
    finally:
        for weight, data in changed:
            weight.data = data


def _weights_to_copy(module: nn.Module, tables: Iterable[Tensor]) -> list[Tensor]:
    linear = [part.weight for part in module.modules() if type(part) is nn.Linear]
    weights: list[Tensor] = [
        weight
        for weight in dict.fromkeys((*linear, *tables))
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    ]
    return weights if sum(weight.nbytes for weight in weights) <= MAX_BYTES else []


# Half-precision products on CUDA are slow if rows of the result are not aligned to 16 bytes: twelve
# rows for a gate made a step of GPT-2 11 % longer on an H200, and 3 % with padding. A compiler pads
# rows that are no multiple of 128 bytes, but then adds the bias in a separate pass, so small parts
# are padded to that.
ALIGNMENT, PADDED = 8, 64
# Padding copies the matrix, which only pays off with many tokens.
MIN_PADDED_TOKENS = 64


def is_aligned(rows: Mapping[str, int]) -> bool:
    """Whether no part needs padding."""
    return all(_padded_size(size) == size for size in rows.values())


def split_linear(
    linear: nn.Module, x: Float[Tensor, "n c"], rows: Mapping[str, int]
) -> dict[str, Float[Tensor, "n rows"]]:
    """The parts of `linear(x)` by name; `rows` are their sizes."""
    pads = x.is_cuda and x.shape[0] >= MIN_PADDED_TOKENS and not is_aligned(rows)
    if pads and type(linear) is nn.Linear:
        return split_padded(linear, x, rows)
    return dict(zip(rows, linear(x).split(list(rows.values()), dim=-1), strict=True))


def split_padded(
    linear: nn.Linear, x: Float[Tensor, "n c"], rows: Mapping[str, int]
) -> dict[str, Float[Tensor, "n rows"]]:
    """The same, with rows of zeros behind each part that is not aligned."""
    sizes = list(rows.values())
    padded = [_padded_size(size) for size in sizes]
    weight = _pad_parts(linear.weight, sizes, padded)
    bias = None if linear.bias is None else _pad_parts(linear.bias, sizes, padded)
    parts = F.linear(x, weight, bias).split(padded, dim=-1)
    return {name: part[:, : rows[name]] for name, part in zip(rows, parts, strict=True)}


def _padded_size(size: int) -> int:
    aligned = size % ALIGNMENT == 0 and size > PADDED
    return size if aligned else size + -size % PADDED


def _pad_parts(values: Tensor, sizes: list[int], padded: list[int]) -> Tensor:
    parts = values.split(sizes)
    empty = (0, 0) * (values.dim() - 1)
    return torch.cat(
        [
            F.pad(part, (*empty, 0, size - part.shape[0]))
            for part, size in zip(parts, padded, strict=True)
        ]
    )
