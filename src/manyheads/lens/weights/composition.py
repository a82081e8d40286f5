"""How heads build on one another, and which are alike, from their weights alone."""

from typing import Literal

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.results.by_pair import ByPair
from manyheads.lens.weights.circuits import Circuits, Factors
from manyheads.models.build import Model
from manyheads.taps import Head, Sublayer

Through = Literal["query", "key", "value"]
Trait = Literal["writes", "query", "key", "value", "ov", "qk"]


def compose(model: Model, through: Through, *, stack: StackName | None = None) -> ByPair:
    """Composition scores from each head to each of a later layer (Elhage et al. 2021).

    The Frobenius norm of the product over the product of norms: QK' OV of the later and the earlier
    head through the query, QK OV through the key, OV OV through the value. Norms in front of heads
    are folded in; two random heads score about one over the root of the width.
    """
    if through not in ("query", "key", "value"):
        raise InputError(f"through={through!r} is no way in", 'use "query", "key" or "value"')
    part = part_of(model, stack)
    found = Circuits(part)
    heads = part.heads
    before = [_written(found.ov(head)) for head in heads]
    after = [_read(found, head, through) for head in heads]
    norms = [torch.stack([each.norm() for each in side]) for side in (before, after)]
    values = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    for layer in part.layers:
        mine = [place for place, head in enumerate(heads) if head.layer == layer]
        later = [place for place, head in enumerate(heads) if head.layer > layer]
        for column in later:
            met = after[column] @ torch.cat([before[row] for row in mine], dim=1)
            size = before[mine[0]].shape[1]
            squares = reduce(met.square(), "a (h b) -> h", "sum", b=size)
            values[mine, column] = squares.sqrt().cpu()
    values /= (norms[0][:, None] * norms[1][None, :]).clamp(min=1e-300).cpu()
    return ByPair(kind=f"{through} composition", blocks=part.blocks, values=values.numpy())


def resemble(
    model: Model,
    trait: Trait = "writes",
    *,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
) -> ByPair:
    """How alike the weights of each two heads are.

    "writes", "query", "key" and "value" compare subspaces: the mean squared cosine of the principal
    angles between what two heads write to, or read from, the residual stream; 1 for the same
    subspace, about size / width for random ones. "ov" and "qk" compare the circuits themselves by
    their Frobenius cosine.
    """
    part = part_of(model, stack, sublayer)
    found = Circuits(part)
    if trait in ("ov", "qk"):
        values = _cosines([getattr(found, trait)(head) for head in part.heads])
    elif trait in ("writes", "query", "key", "value"):
        values = _overlaps([_subspace(found, head, trait) for head in part.heads])
    else:
        raise InputError(
            f"trait={trait!r} is not known", 'use "writes", "query", "key", "value", "ov" or "qk"'
        )
    return ByPair(kind=f"likeness of {trait}", blocks=part.blocks, values=values.cpu().numpy())


def _written(ov: Factors) -> Float[Tensor, "c d"]:
    """What has the norm of OV after any matrix: its left factor, stretched as the right one is."""
    return ov.left @ torch.linalg.qr(ov.right.T).R.T


def _read(found: Circuits, head: Head, through: Through) -> Float[Tensor, "d c"]:
    """What has the norm of the later head's circuit before any matrix."""
    if through == "value":
        ov = found.ov(head)
        return torch.linalg.qr(ov.left).R @ ov.right
    qk = found.qk(head)
    near, far = (qk.right, qk.left) if through == "key" else (qk.left.T, qk.right.T)
    return torch.linalg.qr(far).R @ near


def _subspace(found: Circuits, head: Head, trait: str) -> Float[Tensor, "c k"]:
    """An orthonormal basis, of as many columns as the weights have rank."""
    weights = found.writes(head) if trait == "writes" else found.reads(head, trait).T
    basis, sizes, _ = torch.linalg.svd(weights, full_matrices=False)
    floor = sizes.max() * max(weights.shape) * torch.finfo(torch.float32).eps
    return basis[:, sizes > floor]


def _overlaps(bases: list[Float[Tensor, "c _"]]) -> Float[Tensor, "h h"]:
    count = len(bases)
    values = torch.zeros(count, count, dtype=torch.float64)
    joined = torch.cat(bases, dim=1)
    owner = torch.repeat_interleave(
        torch.arange(count), torch.tensor([basis.shape[1] for basis in bases])
    ).to(joined.device)
    for place, basis in enumerate(bases):
        squares = (joined.T @ basis).square().sum(1)
        summed = squares.new_zeros(count).index_add(0, owner, squares).cpu()
        sizes = [max(1, min(basis.shape[1], other.shape[1])) for other in bases]
        values[place] = summed / torch.tensor(sizes)
    return values


def _cosines(factors: list[Factors]) -> Float[Tensor, "h h"]:
    """<L R, M S> = trace(R' L' M S) = sum over (L'M) * (R S'), all in the head's size."""
    norms = torch.stack([each.singular_values().norm() for each in factors]).cpu()
    values = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for row, one in enumerate(factors):
        for column, other in enumerate(factors):
            met = (one.left.T @ other.left) * (one.right @ other.right.T)
            values[row, column] = met.sum()
    return values / (norms[:, None] * norms[None, :]).clamp(min=1e-300)
