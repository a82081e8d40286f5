"""Gradient importance: an estimate of every head's ablation from one backward pass per batch."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.lens.causal.ablation import Ablation
from manyheads.lens.causal.evaluate import Evaluation
from manyheads.lens.inputs.cached_run import ActivationEditor, StackName, head_scope
from manyheads.lens.inputs.metrics import Metric, metric_name
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import Model
from manyheads.taps import Site, Sublayer, Tap

Estimate = Literal["importance", "normalized", "predicted"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Importance(ByHead):
    """Estimates from gradients: "importance", "normalized" within each layer, and "predicted".

    "importance" is arXiv 1905.10650's E |output_h . dL/d output_h|, summed over the tokens of a
    text; "normalized" divides it by the l2 norm of its layer. "predicted" keeps the sign: the
    change of the metric without the head if the model were linear.
    """

    def agreement(self, exact: Ablation, estimate: Estimate = "importance") -> float:
        """Spearman's rank correlation with the changes measured by ablation."""
        return rank_correlation(self[estimate].means, exact["change"].means)


@wrapping_models
def importance(
    model: Model,
    texts: Inputs,
    metric: Metric = "loss",
    *,
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Importance:
    """All heads from one forward and backward pass per batch; means and errors over texts.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> importance(model, [[1, 2, 3, 4], [5, 6, 7]]).names
    ('importance', 'normalized', 'predicted')
    """
    scope = head_scope(model, stack, sublayer)
    evaluation = Evaluation.of(
        model, texts, metric, targets, batch_tokens=batch_tokens, progress=progress
    )
    sites = [scope.site(layer, Tap.HEAD_OUTPUT) for layer in scope.layers]
    scores = evaluation.gradient_scores(sites, product_by_head)
    means = {
        "importance": [layer.importance for layer in scores],
        "normalized": [F.normalize(layer.importance, dim=0, eps=1e-300) for layer in scores],
        "predicted": [layer.predicted for layer in scores],
    }
    errors = {
        "importance": [layer.importance_error for layer in scores],
        "predicted": [layer.error for layer in scores],
    }
    return Importance(
        kind="importance",
        blocks=scope.blocks,
        means={name: torch.cat(layers).numpy() for name, layers in means.items()},
        errors={name: torch.cat(layers).numpy() for name, layers in errors.items()},
        metadata={"metric": metric_name(metric), "texts": len(evaluation.inputs)},
    )


def rank_correlation(first: Float[np.ndarray, " h"], second: Float[np.ndarray, " h"]) -> float:
    """Spearman's rank correlation; ties share their mean rank and NaNs are ignored.

    >>> round(rank_correlation(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.3, 0.2])), 3)
    0.5
    """
    measured = ~(np.isnan(first) | np.isnan(second))
    ranks = []
    for values in (first[measured], second[measured]):
        _, owner, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts + 1) / 2)[owner])
    if measured.sum() < 2 or any(values.std() == 0 for values in ranks):
        return float("nan")
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def product_by_head(record: ActivationEditor, site: Site, gradient: Tensor) -> Float[Tensor, "n h"]:
    """Output . gradient of every head of a layer, for every token."""
    return (record[site].values.detach() * gradient).sum(-1)
