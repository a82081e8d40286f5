"""Composition of heads and similarity of their weights, from the weights alone."""

from typing import Literal

import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import StackName, head_scope
from manyheads.lens.results.tables import ByPair
from manyheads.lens.weights.circuits import Circuits, FactoredMatrix
from manyheads.models.build import Model
from manyheads.progress import Progress
from manyheads.taps import Head, Sublayer

Through = Literal["query", "key", "value"]
Trait = Literal["writes", "query", "key", "value", "ov", "qk"]


@wrapping_models
def composition_scores(model: Model, through: Through, *, stack: StackName | None = None) -> ByPair:
    """Composition scores from each head to each of a later layer (Elhage et al. 2021).

    The Frobenius norm of the product over the product of norms: QK' OV of the later and the earlier
    head through the query, QK OV through the key, OV OV through the value. Layer norms are folded
    in; two random heads score about 1 / sqrt(width). Weights alone do not show that a head is used:
    confirm a pair by ablation or `patch_paths`. Heads of mixers are left out.
    """
    if through not in ("query", "key", "value"):
        raise InputError(f"through must be query, key or value, got {through!r}", "use one of them")
    scope = head_scope(model, stack, mixers=False)
    factored = Circuits(scope)
    heads = scope.heads
    # Matrices with the norm of OV when multiplied from the left.
    circuits = [factored.ov(head) for head in heads]
    before = [ov.left @ torch.linalg.qr(ov.right.T).R.T for ov in circuits]
    after = [_read(factored, head, through) for head in heads]
    norms = [torch.stack([matrix.norm() for matrix in side]) for side in (before, after)]
    values = torch.full((len(heads), len(heads)), torch.nan, dtype=torch.float64)
    by_layer = {
        layer: [index for index, head in enumerate(heads) if head.layer == layer]
        for layer in scope.layers
    }
    for layer, mine in by_layer.items():
        written = torch.cat([before[row] for row in mine], dim=1)
        for columns in (by_layer[later] for later in scope.layers if later > layer):
            met = torch.cat([after[column] for column in columns]) @ written
            squares = reduce(met.square(), "(k a) (h b) -> h k", "sum", k=len(columns), h=len(mine))
            values[mine[0] : mine[-1] + 1, columns[0] : columns[-1] + 1] = squares.sqrt().cpu()
    values /= (norms[0][:, None] * norms[1][None, :]).clamp(min=1e-300).cpu()
    kind = f"{through} composition (by weights alone)"
    return ByPair(kind=kind, blocks=scope.blocks, values=values.numpy())


@wrapping_models
def weight_similarity(
    model: Model,
    trait: Trait = "writes",
    *,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> ByPair:
    """Similarity of the weights of each two heads.

    "writes", "query", "key" and "value" compare subspaces: the mean squared cosine of the principal
    angles between what two heads write to, or read from, the residual stream; 1 for the same
    subspace, about size / width for random ones. "ov" and "qk" compare the circuits themselves by
    their Frobenius cosine. Of the heads of mixers only "writes" is known.
    """
    scope = head_scope(model, stack, sublayer, mixers=trait == "writes")
    factored = Circuits(scope)
    if trait in ("ov", "qk"):
        values = _cosines([getattr(factored, trait)(head) for head in scope.heads])
    elif trait in ("writes", "query", "key", "value"):
        bases = []
        label, total = "reading weights", len(scope.heads)
        with Progress(label, total=total, unit="heads", enabled=progress) as bar:
            for head in scope.heads:
                weights = (
                    factored.writes(head) if trait == "writes" else factored.reads(head, trait).T
                )
                # An orthonormal basis with as many columns as the rank of the weights.
                basis, sizes, _ = torch.linalg.svd(weights, full_matrices=False)
                floor = sizes.max() * max(weights.shape) * torch.finfo(torch.float32).eps
                bases.append(basis[:, sizes > floor])
                bar.advance()
        values = _overlaps(bases)
    else:
        raise InputError(
            f"trait must be writes, query, key, value, ov or qk, got {trait!r}", "use one of them"
        )
    return ByPair(kind=f"similarity of {trait}", blocks=scope.blocks, values=values.cpu().numpy())


def _read(factored: Circuits, head: Head, through: Through) -> Float[Tensor, "d c"]:
    """A matrix that has the norm of the later head's circuit when multiplied from the right."""
    if through == "value":
        ov = factored.ov(head)
        return torch.linalg.qr(ov.left).R @ ov.right
    qk = factored.qk(head)
    near, far = (qk.right, qk.left) if through == "key" else (qk.left.T, qk.right.T)
    return torch.linalg.qr(far).R @ near


def _overlaps(bases: list[Float[Tensor, "c _"]]) -> Float[Tensor, "h h"]:
    count = len(bases)
    values = torch.zeros(count, count, dtype=torch.float64)
    joined = torch.cat(bases, dim=1)
    owner = torch.repeat_interleave(
        torch.arange(count), torch.tensor([basis.shape[1] for basis in bases])
    ).to(joined.device)
    for index, basis in enumerate(bases):
        squares = (joined.T @ basis).square().sum(1)
        summed = squares.new_zeros(count).index_add(0, owner, squares).cpu()
        sizes = [max(1, min(basis.shape[1], other.shape[1])) for other in bases]
        values[index] = summed / torch.tensor(sizes)
    return values


def _cosines(factors: list[FactoredMatrix]) -> Float[Tensor, "h h"]:
    """<L R, M S> = trace(R' L' M S) = sum over (L'M) * (R S'), all in the head's size."""
    norms = torch.stack([factor.singular_values().norm() for factor in factors]).cpu()
    values = torch.zeros(len(factors), len(factors), dtype=torch.float64)
    for row, one in enumerate(factors):
        for column, other in enumerate(factors):
            met = (one.left.T @ other.left) * (one.right @ other.right.T)
            values[row, column] = met.sum()
    return values / (norms[:, None] * norms[None, :]).clamp(min=1e-300)
