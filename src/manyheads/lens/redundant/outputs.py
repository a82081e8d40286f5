"""How alike two heads write: the vectors that they add to the residual stream, token by token."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.batches import lead
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.results.by_pair import ByPair
from manyheads.models.build import Model
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

KIND = "likeness of outputs"
# Numbers of heads' writes, each as wide as the residual stream, that live at once.
LARGEST_CHUNK = {"cpu": 2**23, "cuda": 2**27}


def resemble_outputs(
    model: Model,
    texts: Any,
    measure: Literal["cosine", "cka"] = "cosine",
    *,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByPair:
    """How alike what two heads write to the residual stream is.

    - "cosine": of the two vectors written at a token, mean over tokens; -1 where one takes back
      what the other writes. A token at which either writes nothing does not count.
    - "cka": linear centred kernel alignment (Kornblith et al., arXiv 1905.00414) over all tokens,
      |Y'X|^2 / (|X'X| |Y'Y|): 1 also where one is the other turned. What heads put out is kept for
      all tokens meanwhile, as much as one residual stream a layer.

    >>> from manyheads.models.build import build
    >>> from manyheads.taps import Head
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = resemble_outputs(model, [[5, 6, 7, 8]])
    >>> round(found.of(Head(1, 0), Head(1, 0)), 4)
    1.0
    """
    if measure not in ("cosine", "cka"):
        raise InputError(f"measure={measure!r} is not known", 'use "cosine" or "cka"')
    part = part_of(model, stack, sublayer)
    found: _Cosines | _Aligned = _Cosines(part) if measure == "cosine" else _Aligned(part)

    def visit(given: Given, _: list[int]) -> None:
        watcher = _Outputs(part)
        with torch.inference_mode():
            climb(model, given, watcher)
        with torch.inference_mode():
            found.take([watcher.seen[layer] for layer in part.layers])

    passed = lead(
        model, texts, visit, label="reading outputs", batch_tokens=batch_tokens, progress=progress
    )
    facts = passed.facts | {"measure": measure}
    return ByPair(kind=KIND, blocks=part.blocks, values=found.values(), facts=facts)


class _Outputs:
    """A watcher that keeps what the output projections of a part get."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self.seen: dict[int, Float[Tensor, "n h d"]] = {}

    def wants(self, site: Site) -> bool:
        return site == self._part.site(site.layer, Tap.HEAD_OUTPUT) if site.layer >= 0 else False

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        self.seen[site.layer] = value.values


@dataclass(slots=True, eq=False)
class _Cosines:
    """Cosines added up over tokens, and the tokens at which both heads write."""

    part: Part
    writers: list[Float[Tensor, "h d c"]] = field(init=False)
    cosines: Float[Tensor, "h h"] = field(init=False)
    tokens: Float[Tensor, "h h"] = field(init=False)

    def __post_init__(self) -> None:
        self.writers = _writers(self.part)
        heads, device = len(self.part.heads), self.writers[0].device
        self.cosines = torch.zeros(heads, heads, dtype=torch.float64, device=device)
        self.tokens = torch.zeros_like(self.cosines)

    def take(self, outputs: list[Float[Tensor, "n _ _"]]) -> None:
        heads, width = len(self.part.heads), self.writers[0].shape[-1]
        home = "cpu" if self.cosines.device.type == "cpu" else "cuda"
        step = max(1, LARGEST_CHUNK[home] // (heads * width))
        cosines, tokens = torch.zeros_like(self.cosines), torch.zeros_like(self.tokens)
        for start in range(0, len(outputs[0]), step):
            written = torch.cat(
                [
                    torch.einsum("nhd,hdc->hnc", each[start : start + step].float(), writer)
                    for each, writer in zip(outputs, self.writers, strict=True)
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


@dataclass(slots=True, eq=False)
class _Aligned:
    """What heads put out, kept by layer in as many numbers as the head has."""

    part: Part
    factors: list[Float[Tensor, "h d k"]] = field(init=False)
    kept: list[list[Float[Tensor, "n h k"]]] = field(init=False)

    def __post_init__(self) -> None:
        # R of W = QR has all the lengths and angles of what one head writes, in its own size.
        self.factors = [torch.linalg.qr(writer.mT).R.mT for writer in _writers(self.part)]
        self.kept = [[] for _ in self.factors]

    def take(self, outputs: list[Float[Tensor, "n _ _"]]) -> None:
        written = [
            torch.einsum("nhd,hdk->nhk", each.float(), factor).cpu()
            for each, factor in zip(outputs, self.factors, strict=True)
        ]
        for layer, each in zip(self.kept, written, strict=True):
            layer.append(each)

    def values(self) -> Float[np.ndarray, "h h"]:
        device = self.factors[0].device
        layers = [torch.cat(each) for each in self.kept]
        layers = [each - each.double().mean(0).float() for each in layers]
        blocks = []
        for one in layers:
            left = rearrange(one.to(device), "n h k -> n (h k)")
            row = []
            for other in layers:
                right = rearrange(other.to(device), "n h k -> n (h k)")
                met = (left.T @ right).double().square()
                row.append(
                    reduce(met, "(h k) (g j) -> h g", "sum", h=one.shape[1], g=other.shape[1])
                )
            blocks.append(torch.cat(row, dim=1))
        squares = torch.cat(blocks)
        own = squares.diagonal().sqrt()
        # A head that always writes the same varies with nothing.
        product = own[:, None] * own
        return np.asarray(torch.where(product > 0, squares / product, torch.nan).cpu().numpy())


def _writers(part: Part) -> list[Float[Tensor, "h d c"]]:
    """Each layer's slices of the output projection."""
    found = []
    for layer in part.layers:
        attention = part.attention(layer)
        weight = attention.output.weight.detach().float()
        found.append(rearrange(weight, "c (h d) -> h d c", h=attention.config.heads).contiguous())
    return found
