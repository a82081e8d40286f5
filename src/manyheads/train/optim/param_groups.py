"""Parameter groups: weight decay, learning-rate factors, and fused matrices and their parts."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.annotations import NonNegativeFloat
from manyheads.argument_checks import check_fields
from manyheads.attention import Attention
from manyheads.errors import ConfigError
from manyheads.models.readout import ReadoutLayer
from manyheads.parts import experts, feedforward


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RateFactor:
    """A factor on the learning rate of parameters whose name matches the glob `pattern`.

    Queries, keys, values and gates are rows of one matrix, `attention.project`, and have names of
    their own: `*.attention.query.*`. If several patterns match, the last one counts.
    """

    pattern: str
    factor: NonNegativeFloat

    def matches(self, address: str) -> bool:
        return fnmatchcase(address, self.pattern)


MATRICES = (nn.Linear, nn.LSTM, experts.MixtureOfExperts)
DECAYED = (*MATRICES, nn.Conv2d, ReadoutLayer)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ParameterInfo:
    """A parameter and the matrices that are fused in it along `axis`, by name and size.

    Norms, biases, embeddings and scales do not `decays`. A `table` is an embedding, which decays
    only with `decay_embeddings`. A `matrix` maps one hidden space to another, so embeddings and
    readouts are not matrices.
    """

    parameter: nn.Parameter
    decays: bool
    table: bool
    matrix: bool
    axis: int
    parts: tuple[tuple[str, int], ...]


def describe_parameters(model: nn.Module) -> list[ParameterInfo]:
    """Every trainable parameter, once."""
    joined = _joined(model)
    result, met = [], set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in met or not parameter.requires_grad:
                continue
            met.add(parameter)
            whole = (0, ((_address(prefix, name), parameter.shape[0] if parameter.dim() else 1),))
            axis, parts = joined.get(parameter, whole)
            # In a partly trained parameter the frozen rows must not decay.
            moves = name not in getattr(module, "partly", ())
            # Experts have a matrix each; their biases have one axis less.
            is_weight = parameter.dim() > (2 if isinstance(module, experts.MixtureOfExperts) else 1)
            matrix = is_weight and isinstance(module, MATRICES) and min(parameter.shape[-2:]) > 1
            result.append(
                ParameterInfo(
                    parameter=parameter,
                    decays=moves and is_weight and isinstance(module, DECAYED),
                    table=moves and isinstance(module, nn.Embedding),
                    matrix=matrix,
                    axis=axis,
                    parts=parts,
                )
            )
    return result


def _joined(model: nn.Module) -> dict[nn.Parameter, tuple[int, tuple[tuple[str, int], ...]]]:
    """Parameters with several fused matrices: the axis, and names and sizes along it."""
    result = {}
    for prefix, module in model.named_modules():
        match module:
            case Attention():
                for _, linear, rows in module.input_layers:
                    for name, parameter in linear.named_parameters(recurse=False):
                        parts = [(_address(prefix, f"{part}.{name}"), rows[part]) for part in rows]
                        result[parameter] = (0, tuple(parts))
            case feedforward.FeedForward() if module.gated:
                for name, parameter in module.expand.named_parameters(recurse=False):
                    half = (_address(prefix, f"expand.{name}"), module.config.hidden)
                    result[parameter] = (0, (half, half))
            case experts.MixtureOfExperts():
                half = (_address(prefix, "expand"), module.config.hidden)
                result[module.expand] = (2, (half, half))
    return result


def _address(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def build_param_groups(
    weights: Iterable[ParameterInfo],
    *,
    lr: float,
    decay: float,
    rates: Sequence[RateFactor],
    decay_embeddings: bool = False,
    **more: Any,
) -> list[dict[str, Any]]:
    """Parameter groups for a torch optimizer.

    Beside torch's own entries, `peak` is the learning rate that a schedule multiplies, and `parts`
    are the sizes along `axis` of the fused matrices, and their own factors.
    """
    grouped: dict[Any, dict[str, Any]] = {}
    for info in weights:
        factors = [
            next((rate.factor for rate in reversed(rates) if rate.matches(address)), 1.0)
            for address, _ in info.parts
        ]
        alike = len(set(factors)) == 1
        peak = lr * factors[0] if alike else lr
        sizes = [size for _, size in info.parts]
        shares = [1.0] * len(sizes) if alike else factors
        # One part is the whole parameter, of whatever size.
        parts = tuple(zip(sizes, shares, strict=True)) if len(sizes) > 1 else ()
        decays = info.decays or (decay_embeddings and info.table)
        key = (peak, decays, info.axis, parts)
        group = grouped.setdefault(key, {"params": [], **more})
        group["params"].append(info.parameter)
        group |= {
            "lr": peak,
            "peak": peak,
            "weight_decay": decay if decays else 0.0,
            "axis": info.axis,
            "parts": parts,
        }
    return list(grouped.values())


def checked_parameters(model: nn.Module, rates: Sequence[RateFactor]) -> list[ParameterInfo]:
    """All trainable parameters; an error if a pattern matches none, since it may be misspelt."""
    weights = describe_parameters(model)
    addresses = list(dict.fromkeys(address for info in weights for address, _ in info.parts))
    for rate in rates:
        if not any(map(rate.matches, addresses)):
            near = get_close_matches(rate.pattern, addresses, n=1, cutoff=0.0)
            raise ConfigError(
                f"no parameter matches {rate.pattern!r}", f"use a pattern that matches {near[0]}"
            )
    return weights


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor


def part_of_row(group: dict[str, Any], parameter: Any) -> Int[Tensor, " rows"]:
    """The part of each row along the group's axis; for a shard, of its own rows."""
    axis = group["axis"]
    start, stop = 0, parameter.shape[axis]
    sizes = tuple(size for size, _ in group["parts"]) or (stop,)
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        start, stop = offset[axis], offset[axis] + shape[axis]
    return _part_of_row(sizes, start, stop, parameter.device)


@lru_cache(maxsize=256)
def _part_of_row(
    sizes: tuple[int, ...], start: int, stop: int, device: torch.device
) -> Int[Tensor, " rows"]:
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[start:stop].to(device)


def spans(group: dict[str, Any]) -> Iterator[tuple[slice, float]]:
    """The slice of each part along the group's axis, and its factor."""
    ends = list(accumulate(size for size, _ in group["parts"]))
    for (size, factor), end in zip(group["parts"], ends, strict=True):
        yield slice(end - size, end), factor
    if not ends:
        yield slice(None), 1.0
