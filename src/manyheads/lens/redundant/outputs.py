"""Similarity of what two heads write to the residual stream, token by token."""

from typing import Literal, cast

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, for_each_batch
from manyheads.lens.results import addresses, tables
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged
from manyheads.taps import Record, Sublayer, Tap

KIND = "output similarity"
# Elements of head outputs, each as wide as the residual stream, that are in memory at once.
LARGEST_CHUNK = {"cpu": 2**23, "cuda": 2**27}


@wrapping_models
def output_similarity(
    model: build.Model,
    texts: Inputs,
    measure: Literal["cosine", "cka"] = "cosine",
    *,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> tables.ByPair:
    """Similarity of what each two heads write to the residual stream.

    - "cosine": of the two vectors written at a token, mean over tokens; -1 if one head cancels the
      other. Tokens at which either writes nothing do not count.
    - "cka": linear centered kernel alignment (Kornblith et al., arXiv 1905.00414) over all tokens,
      |Y'X|^2 / (|X'X| |Y'Y|), which ignores rotations. It keeps the outputs of all tokens, as much
      as one residual stream per layer.

    >>> from manyheads.models.build import build
    >>> from manyheads.taps import Head
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> similarity = output_similarity(model, [[5, 6, 7, 8]])
    >>> round(similarity.of(Head(1, 0), Head(1, 0)), 4)
    1.0
    """
    if measure not in ("cosine", "cka"):
        raise InputError(f"measure must be cosine or cka, got {measure!r}", "use one of them")
    scope = head_scope(model, stack, sublayer)
    tally = _Cosines(scope) if measure == "cosine" else _KernelAlignment(scope)
    sites = [scope.site(layer, Tap.HEAD_OUTPUT) for layer in scope.layers]

    def visit(inputs: model_interface.ModelInputs, _: list[int]) -> None:
        outputs = Record(sites)
        with torch.inference_mode():
            model.run_hidden(inputs, outputs)
            tally.update([cast(Ragged, outputs[site]).values for site in sites])

    passed = for_each_batch(
        model, texts, visit, label="reading outputs", batch_tokens=batch_tokens, progress=progress
    )
    metadata = passed.metadata | {"measure": measure}
    return tables.ByPair(kind=KIND, blocks=scope.blocks, values=tally.values(), metadata=metadata)


class _Cosines:
    """Sums of cosines over tokens, and the number of tokens at which both heads write."""

    def __init__(self, scope: HeadScope) -> None:
        self.writers = _writers(scope)
        heads, device = len(scope.heads), self.writers[0].device
        self.cosines = torch.zeros(heads, heads, dtype=torch.float64, device=device)
        self.tokens = torch.zeros_like(self.cosines)

    def update(self, outputs: list[Float[Tensor, "n _ _"]]) -> None:
        heads, width = len(self.cosines), self.writers[0].shape[-1]
        home = "cpu" if self.cosines.device.type == "cpu" else "cuda"
        step = max(1, LARGEST_CHUNK[home] // (heads * width))
        cosines, tokens = torch.zeros_like(self.cosines), torch.zeros_like(self.tokens)
        for start in range(0, len(outputs[0]), step):
            written = torch.cat(
                [
                    torch.einsum("nhd,hdc->hnc", output[start : start + step].float(), writer)
                    for output, writer in zip(outputs, self.writers, strict=True)
                ]
            )
            norms = torch.linalg.vector_norm(written, dim=-1, keepdim=True)
            rows = (written / norms.clamp(min=torch.finfo(torch.float32).tiny)).flatten(1)
            cosines += (rows @ rows.T).double()
            writes = (norms.squeeze(-1) > 0).float()
            tokens += (writes @ writes.T).double()
        self.cosines += cosines
        self.tokens += tokens

    def values(self) -> Float[np.ndarray, "h h"]:
        return np.asarray((self.cosines / self.tokens).cpu().numpy())


class _KernelAlignment:
    """The outputs of all tokens by layer, reduced to the size of a head."""

    def __init__(self, scope: HeadScope) -> None:
        # R of W = QR preserves all norms and angles of what a head writes, in the head's own size.
        self.factors = [torch.linalg.qr(writer.mT).R.mT for writer in _writers(scope)]
        self.batches: list[list[Float[Tensor, "n _ _"]]] = [[] for _ in self.factors]

    def update(self, outputs: list[Float[Tensor, "n _ _"]]) -> None:
        for batches, output, factor in zip(self.batches, outputs, self.factors, strict=True):
            batches.append(torch.einsum("nhd,hdk->nhk", output.float(), factor).cpu())

    def values(self) -> Float[np.ndarray, "h h"]:
        device = self.factors[0].device
        layers = [torch.cat(batches) for batches in self.batches]
        layers = [layer - layer.double().mean(0).float() for layer in layers]
        blocks = []
        for one in layers:
            left = rearrange(one.to(device), "n h k -> n (h k)")
            row = []
            for other in layers:
                right = rearrange(other.to(device), "n h k -> n (h k)")
                products = (left.T @ right).double().square()
                row.append(
                    reduce(products, "(h k) (g j) -> h g", "sum", h=one.shape[1], g=other.shape[1])
                )
            blocks.append(torch.cat(row, dim=1))
        squares = torch.cat(blocks)
        own = squares.diagonal().sqrt()
        # A head that always writes the same has no variance to align.
        product = own[:, None] * own
        return np.asarray(torch.where(product > 0, squares / product, torch.nan).cpu().numpy())


def _writers(scope: HeadScope) -> list[Float[Tensor, "h d c"]]:
    """The output projection of each layer, split by head."""
    weights = []
    for layer in scope.layers:
        weight = addresses.output_weight(scope.stack, layer, scope.sublayer).detach().float()
        weights.append(rearrange(weight, "c (h d) -> h d c", h=scope.heads_of(layer)).contiguous())
    return weights
