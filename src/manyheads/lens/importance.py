"""The importance of every head from one backward pass, beside what ablation finds exactly."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.ablation import Ablation
from manyheads.lens.effects import ROOM_ON_CPU, ROOM_ON_CUDA
from manyheads.lens.given import Given, Targets, read, run, shares
from manyheads.lens.metrics import Judge, Metric, judge, named, weighed
from manyheads.lens.results import ByHead
from manyheads.lens.trunk import Edits, Part, StackName, part_of
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Site, Sublayer, Tap

__all__ = ["Importance", "importance", "rank_correlation"]

Estimate = Literal["importance", "normalised", "predicted"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Importance(ByHead):
    """Estimates from gradients: "importance", "normalised" within each layer, and "predicted".

    "importance" is arXiv 1905.10650's E |output_h . dL/d output_h|, summed over the tokens of a
    text; "normalised" divides it by the l2 norm of its layer. "predicted" keeps the sign: by how
    much the metric would change without the head, were the model linear.
    """

    def agreement(self, exact: Ablation, estimate: Estimate = "importance") -> float:
        """Spearman's rank correlation with the changes that ablation measured."""
        return rank_correlation(self[estimate].means, exact["change"].means)


def importance(
    model: Model,
    texts: Any,
    metric: Metric = "loss",
    *,
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    room: int | None = None,
    shown: bool = True,
) -> Importance:
    """All heads from one forward and one backward a batch; means and errors over texts.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> importance(model, [[1, 2, 3, 4], [5, 6, 7]]).names
    ('importance', 'normalised', 'predicted')
    """
    part, given = part_of(model, stack, sublayer), read(model, texts)
    if room is None:
        room = ROOM_ON_CUDA if next(model.parameters()).is_cuda else ROOM_ON_CPU
    sizes = given.sizes(model)
    found, weights = [], []
    with Progress("differentiating", total=sum(sizes), unit="tokens", shown=shown) as bar:
        for chosen in shares(sizes, room):
            judged = judge(model, given, chosen, metric, targets)
            found.append(_estimates(part, given.select(chosen), judged))
            weights.append(judged.weights.double().cpu())
            bar.advance(sum(sizes[text] for text in chosen))
    return _result(part, torch.cat(found), torch.cat(weights), named(metric))


def rank_correlation(one: Float[np.ndarray, " h"], other: Float[np.ndarray, " h"]) -> float:
    """Spearman's: the correlation of ranks, equal values sharing theirs; NaNs are left out.

    >>> round(rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.3, 0.2])), 3)
    0.5
    """
    known = ~(np.isnan(one) | np.isnan(other))
    first, second = _ranks(one[known]), _ranks(other[known])
    if known.sum() < 2 or first.std() == 0 or second.std() == 0:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def _estimates(part: Part, given: Given, judged: Judge) -> Float[Tensor, "b heads 2"]:
    """For every text and head, |output . gradient| and -output . gradient, summed over tokens."""
    sites = [part.site(layer, Tap.HEAD_OUTPUT) for layer in part.layers]
    final = "decoder" if part.stack_name == "encoder" else part.stack_name
    last = Site(-1, Tap.FINAL, stack=final)
    with resting(part.model), torch.enable_grad():
        seen = Edits(dict.fromkeys(sites, _tracked), [*sites, last])
        run(part.model, given, seen)
        total = judged(seen[last]).sum()
        outputs = [seen[site].values for site in sites]
        gradients = torch.autograd.grad(total, outputs)
    columns = []
    for site, gradient in zip(sites, gradients, strict=True):
        along = (seen[site].values.detach() * gradient).sum(-1).double()
        pair = torch.stack((along.abs(), -along), dim=-1)
        columns.append(_by_text(seen[site], pair))
    return torch.cat(columns, dim=1).cpu()


def _tracked(values: Tensor) -> Tensor:
    return values if values.requires_grad else values.detach().requires_grad_()


def _by_text(like: Ragged, values: Float[Tensor, "n h 2"]) -> Float[Tensor, "b h 2"]:
    summed = values.new_zeros(len(like), *values.shape[1:])
    return summed.index_add(0, like.lengths.sequence_of_token, values)


def _result(
    part: Part, found: Float[Tensor, "b heads 2"], weights: Float[Tensor, " b"], metric: str
) -> Importance:
    means, errors = weighed(found, weights)
    start, normalised = 0, []
    for block in part.blocks:
        mine = means[start : start + block.heads, 0]
        normalised.append(mine / mine.norm().clamp(min=torch.finfo(mine.dtype).tiny))
        start += block.heads
    return Importance(
        kind="importance",
        blocks=part.blocks,
        means={
            "importance": means[:, 0].numpy(),
            "normalised": torch.cat(normalised).numpy(),
            "predicted": means[:, 1].numpy(),
        },
        errors={"importance": errors[:, 0].numpy(), "predicted": errors[:, 1].numpy()},
        facts={"metric": metric, "texts": len(weights)},
    )


def _ranks(values: Float[np.ndarray, " k"]) -> Float[np.ndarray, " k"]:
    order = values.argsort()
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values), dtype=float)
    for value in np.unique(values):
        same = values == value
        ranks[same] = ranks[same].mean()
    return ranks
