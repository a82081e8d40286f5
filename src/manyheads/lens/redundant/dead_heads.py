"""Dead heads: heads that do nothing, each with the reasons."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.inputs.cached_run import StackName, head_scope
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import Address, HeadName, pick_head
from manyheads.lens.results.tables import ByHead
from manyheads.models.build import Model
from manyheads.taps import Sublayer

KIND = "dead heads"
# A head is dead if the loss (in nats per token) changes by less than this without it.
LOSS_BELOW = 1e-3
# A head is dead if its entropy is above this fraction of the maximum: it attends uniformly.
ENTROPY_ABOVE = 0.99
# A head is dead if its output has less than this fraction of the residual stream's norm.
NORM_BELOW = 1e-3

Reason = Literal["ablation", "entropy", "norm"]
EXPLAINED: dict[Reason, str] = {
    "ablation": "without it the loss changes by {loss_change:+.2g} (below {loss_below:g})",
    "entropy": "its entropy is {normalized_entropy:.4f} of the maximum (above {entropy_above:g})",
    "norm": "it writes {output_share:.2g} of the residual stream (below {norm_below:g})",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class DeadHeads(ByHead):
    """The measures of every head, and which heads are dead by the thresholds in `metadata`.

    "loss_change" is the effect of ablation, "normalized_entropy" the entropy over its maximum,
    "output_share" the norm of the output over that of the residual stream.
    """

    @property
    def reasons(self) -> dict[Address, tuple[Reason, ...]]:
        """The reasons of every dead head, by name; a measure that is missing is none."""
        metadata, means = self.metadata, self.means
        checks: dict[Reason, Any] = {
            "entropy": means["normalized_entropy"] > metadata["entropy_above"]
        }
        if "output_share" in means:
            checks["norm"] = means["output_share"] < metadata["norm_below"]
        if "loss_change" in means:
            idle = np.abs(means["loss_change"]) < metadata["loss_below"]
            checks = {"ablation": idle, **checks}
        reasons = {
            address: tuple(reason for reason, met in checks.items() if met[index])
            for index, address in enumerate(self.addresses)
        }
        return {address: why for address, why in reasons.items() if why}

    @property
    def heads(self) -> tuple[Address, ...]:
        """The dead heads, in order."""
        return tuple(self.reasons)

    def why(self, head: HeadName) -> tuple[Reason, ...]:
        """The reasons of one head; none if it is alive."""
        return self.reasons.get(pick_head(self.addresses, head), ())

    def rows(self) -> list[dict[str, Any]]:
        """One record per head, with its reasons."""
        reasons = self.reasons
        pairs = zip(ByHead.rows(self), self.addresses, strict=True)
        return [row | {"dead": ", ".join(reasons.get(head, ()))} for row, head in pairs]

    def _lines(self) -> Iterator[str]:
        reasons = self.reasons
        yield f"{len(reasons)} of {len(self.addresses)} heads are dead"
        for address, why in reasons.items():
            facts = self.metadata | self.of(address)
            yield f"  {address}: {', '.join(EXPLAINED[reason].format(**facts) for reason in why)}"


@wrapping_models
def dead_heads(
    model: Model,
    texts: Inputs,
    *,
    loss_below: float = LOSS_BELOW,
    entropy_above: float = ENTROPY_ABOVE,
    norm_below: float = NORM_BELOW,
    replace_with: Replacement | None = "zero",
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> DeadHeads:
    """Which heads are dead, each with its reasons.

    - "ablation": without the head the loss changes by less than `loss_below`, up or down
    - "entropy": its entropy is above `entropy_above` of ln(number of visible keys), over queries
      that see two keys or more
    - "norm": its output has less than `norm_below` of the norm of the residual stream that it is
      added to

    Ablated heads are replaced with zeros, or as `replace_with` says (see `ablate`); None skips
    ablation. So does a model that predicts no next token, unless it has `targets`.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> dead_heads(model, [[1, 2, 3, 4], [5, 6, 7]], replace_with=None).why("L0H0")
    ('entropy',)
    """
    thresholds = {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
    }
    _check(**thresholds)
    scope = head_scope(model, stack, sublayer)
    inputs = read_inputs(model, texts)
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    seen = statistics(model, inputs, **shared)
    addresses, complete = set(scope.addresses), seen.complete
    in_scope = np.array([address in addresses for address in seen.addresses])
    means, errors = (
        {name: values[in_scope] for name, values in columns.items()}
        for columns in (seen.means, seen.errors)
    )
    if replace_with is not None and (targets is not None or predicts_next_token(model)):
        shared |= {"stack": stack, "sublayer": sublayer, "targets": targets}
        ablation = ablate(model, inputs, replace_with=replace_with, **shared)
        means["loss_change"] = ablation["change"].means
        errors["loss_change"] = ablation["change"].errors
        complete = complete and ablation.complete
    metadata = seen.metadata | {"complete": complete}
    measured = ByHead(kind=KIND, blocks=scope.blocks, means=means, errors=errors, metadata=metadata)
    dead = dead_by_statistics(measured, **thresholds)
    return replace(dead, metadata=dead.metadata | {"replace_with": replace_with})


def dead_by_statistics(
    seen: ByHead,
    *,
    loss_below: float = LOSS_BELOW,
    entropy_above: float = ENTROPY_ABOVE,
    norm_below: float = NORM_BELOW,
) -> DeadHeads:
    """The dead heads by measured statistics; by ablation too if they have "loss_change"."""
    _check(loss_below, entropy_above, norm_below)
    names = [name for name in ("loss_change", "normalized_entropy", "output_share") if name in seen]
    metadata = {name: seen.metadata[name] for name in ("texts", "tokens", "complete")} | {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
    }
    return DeadHeads(
        kind=KIND,
        blocks=seen.blocks,
        means={name: seen.means[name] for name in names},
        errors={name: seen.errors[name] for name in names if name in seen.errors},
        metadata=metadata,
    )


def predicts_next_token(model: Model) -> bool:
    """Whether a model predicts each next token, and so has a loss without further targets."""
    return model.predicts_next_token


def _check(loss_below: float, entropy_above: float, norm_below: float) -> None:
    for name, value in (("loss_below", loss_below), ("norm_below", norm_below)):
        if value < 0:
            raise InputError(f"{name} must be at least 0, got {value}", "use 0 or more")
    if not 0 < entropy_above <= 1:
        raise InputError(
            f"entropy_above must be in (0, 1], got {entropy_above}",
            "use a value above 0, at most 1",
        )
