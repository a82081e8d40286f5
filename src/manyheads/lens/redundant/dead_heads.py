"""Heads that do nothing, each with the reasons why it is held to be dead."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.replacement import How
from manyheads.lens.inputs.batches import gather
from manyheads.lens.inputs.cached_run import StackName, part_of
from manyheads.lens.inputs.texts import Targets
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.taps import Head, Sublayer

KIND = "dead heads"
# A head without which the loss (in nats a token) moves by less than this does nothing.
LOSS_BELOW = 1e-3
# A head whose entropy is this share of the largest there can be looks at everything alike.
ENTROPY_ABOVE = 0.99
# A head that writes less than this share of the residual stream's norm writes nothing.
NORM_BELOW = 1e-3

FloatsByHead = Float[np.ndarray, " h"]
Reason = Literal["ablation", "entropy", "norm"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Dead(ByHead):
    """What each head would be dead of, and which of them are, by the thresholds in `facts`.

    "loss_change" is what ablation found, "normalized_entropy" the entropy beside its maximum,
    "output_share" the norm of what is written beside that of the residual stream.
    """

    @property
    def reasons(self) -> dict[Address, tuple[Reason, ...]]:
        """For every dead head its reasons, by name."""
        checks = self._checks()
        found: dict[Address, tuple[Reason, ...]] = {}
        for place, address in enumerate(self.addresses):
            mine = tuple(reason for reason, met in checks.items() if met[place])
            if mine:
                found[address] = mine
        return found

    @property
    def heads(self) -> tuple[Address, ...]:
        """The dead, in order."""
        return tuple(self.reasons)

    def why(self, head: Head | Address) -> tuple[Reason, ...]:
        """The reasons of one head; none where it is alive."""
        self.of(head)
        address = Address(head) if isinstance(head, Head) else head
        return self.reasons.get(address, ())

    def rows(self) -> list[dict[str, Any]]:
        """One record per head, with its reasons."""
        reasons = self.reasons
        pairs = zip(ByHead.rows(self), self.addresses, strict=True)
        return [row | {"dead": ", ".join(reasons.get(head, ()))} for row, head in pairs]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        reasons = self.reasons
        yield f"{len(reasons)} of {len(self.addresses)} heads are dead"
        for address, why in reasons.items():
            yield f"  {address}: {', '.join(self._said(address, reason) for reason in why)}"

    def _said(self, address: Address, reason: Reason) -> str:
        values, facts = self.of(address), self.facts
        match reason:
            case "ablation":
                return (
                    f"without it the loss changes by {values['loss_change']:+.2g} "
                    f"(below {facts['loss_below']:g})"
                )
            case "entropy":
                return (
                    f"its entropy is {values['normalized_entropy']:.4f} of the maximum "
                    f"(above {facts['entropy_above']:g})"
                )
            case "norm":
                return (
                    f"it writes {values['output_share']:.2g} of the residual stream "
                    f"(below {facts['norm_below']:g})"
                )

    def _checks(self) -> Mapping[Reason, Any]:
        """By reason, which heads it holds for; what was not measured holds for none."""
        facts, means = self.facts, self.means
        checks: dict[Reason, Any] = {
            "entropy": means["normalized_entropy"] > facts["entropy_above"],
            "norm": means["output_share"] < facts["norm_below"],
        }
        if "loss_change" in means:
            return {"ablation": np.abs(means["loss_change"]) < facts["loss_below"], **checks}
        return checks


def dead(
    model: Model,
    texts: Any,
    *,
    loss_below: float = LOSS_BELOW,
    entropy_above: float = ENTROPY_ABOVE,
    norm_below: float = NORM_BELOW,
    how: How | Literal["not"] = "zero",
    targets: Targets | None = None,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Dead:
    """Which heads are dead, each with its reasons by name.

    - "ablation": without the head the loss changes by less than `loss_below`, either way
    - "entropy": its entropy is more than `entropy_above` of ln(number of visible keys), over
      queries that see two keys or more
    - "norm": what it writes has less than `norm_below` of the norm of the residual stream that it
      is added to

    Heads are ablated by zeroes, or as `how` says; `how="not"` leaves that out. A model that writes
    no next token needs `targets` for it (see `ablate`), and goes without where there are none.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> dead(model, [[1, 2, 3, 4], [5, 6, 7]], how="not").why(Head(0, 0))
    ('entropy',)
    """
    _check(loss_below, entropy_above, norm_below)
    part = part_of(model, stack, sublayer)
    given = gather(model, texts)
    seen = statistics(model, given, batch_tokens=batch_tokens, progress=progress)
    means, errors = _of_part(seen, part.blocks)
    facts = {name: seen.facts[name] for name in ("texts", "tokens", "complete")}
    if how != "not" and (targets is not None or writes_next(model)):
        found = ablate(
            model,
            given,
            replace_with=how,
            targets=targets,
            stack=stack,
            sublayer=sublayer,
            room=batch_tokens,
            shown=progress,
        )
        means = {"loss_change": found["change"].means, **means}
        errors = {"loss_change": found["change"].errors, **errors}
        facts["complete"] = seen.complete and found.complete
    thresholds = {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
        "how": how,
    }
    return Dead(kind=KIND, blocks=part.blocks, means=means, errors=errors, facts=facts | thresholds)


def dead_by_statistics(
    seen: ByHead,
    *,
    loss_below: float = LOSS_BELOW,
    entropy_above: float = ENTROPY_ABOVE,
    norm_below: float = NORM_BELOW,
) -> Dead:
    """The dead of what was measured already; by ablation where it has "loss_change"."""
    _check(loss_below, entropy_above, norm_below)
    means, errors = _of_part(seen, seen.blocks)
    facts = {name: seen.facts[name] for name in ("texts", "tokens", "complete")}
    thresholds = {
        "loss_below": loss_below,
        "entropy_above": entropy_above,
        "norm_below": norm_below,
    }
    return Dead(kind=KIND, blocks=seen.blocks, means=means, errors=errors, facts=facts | thresholds)


def _of_part(
    seen: ByHead, blocks: tuple[Block, ...]
) -> tuple[dict[str, FloatsByHead], dict[str, FloatsByHead]]:
    """The measures that tell, of the heads of some attentions."""
    wanted = {address for block in blocks for address in block.addresses}
    kept = np.array([address in wanted for address in seen.addresses])
    names = [name for name in ("loss_change", "normalized_entropy", "output_share") if name in seen]
    return (
        {name: seen.means[name][kept] for name in names},
        {name: seen.errors[name][kept] for name in names if name in seen.errors},
    )


def writes_next(model: Model) -> bool:
    """Whether a model is asked for each next token where no other answers are given."""
    writes = isinstance(model, Decoder | Seq2Seq)
    return writes and isinstance(model.config.readout, LanguageHead)


def _check(loss_below: float, entropy_above: float, norm_below: float) -> None:
    for name, value in (("loss_below", loss_below), ("norm_below", norm_below)):
        if value < 0:
            raise InputError(f"{name}={value} is below nothing", "use 0 or more")
    if not 0 < entropy_above <= 1:
        raise InputError(
            f"entropy_above={entropy_above} is no share of the maximum", "use one above 0, up to 1"
        )
