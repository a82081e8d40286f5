"""Everything that a report tells of a model and a text, measured step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.ablation import Ablation, ablate
from manyheads.lens.addresses import blocks_of
from manyheads.lens.dead import LOSS_BELOW, Dead, dead_by_statistics
from manyheads.lens.importance import Importance, importance
from manyheads.lens.kinds import kinds
from manyheads.lens.labels import Kinds
from manyheads.lens.metrics import Similarity
from manyheads.lens.patterns import Largest, top_keys
from manyheads.lens.redundancy import Redundancy, redundancy
from manyheads.lens.results import ByHead
from manyheads.lens.statistics import Statistics, statistics
from manyheads.models.build import Model
from manyheads.models.readout import LanguageHead
from manyheads.models.vision import Vision
from manyheads.report.reading import Reading, read_picture, read_text
from manyheads.surgery.evaluation_inputs import EvaluationInputs, prepare_inputs
from manyheads.wording import counted

__all__ = ["By", "Findings", "Worth", "examine"]

By = Literal["auto", "ablation", "gradient", "none"]
Say = Callable[[str], None]

# Multiplications that ablating every head may cost before gradients are used instead; 1.1e12 took
# 59 seconds of an aarch64 core.
MOST_WORK = 1.5e12
# Likeness of outputs needs few tokens to be told.
LIKENESS_TEXTS = 8
# Keys of all queries of all heads together, and of one query.
MOST_WEIGHTS = 900_000
FEWEST_KEYS, MOST_KEYS = 4, 32


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Worth:
    """What the model would lose without each head: positive where it needs the head.

    `metric` is "loss" in nats a token, or "likeness" of a text's vector; `by` says how it was told.
    """

    loses: Float[np.ndarray, " h"]
    errors: Float[np.ndarray, " h"]
    metric: Literal["loss", "likeness"]
    by: Literal["ablation", "gradient"]
    baseline: float | None
    texts: int

    @property
    def harmful(self) -> list[int]:
        """Heads without which the model does better by more than two standard errors."""
        found = np.flatnonzero(-self.loses > 2 * self.errors)
        return sorted(found.tolist(), key=lambda place: self.loses[place])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Findings:
    """What was measured, and on what."""

    name: str
    model: Model
    reading: Reading
    seen: Statistics
    kinds: Kinds
    worth: Worth | None
    worth_missing: str
    dead: Dead
    alike: Redundancy
    largest: tuple[Largest, ...]
    keys: int

    @property
    def heads(self) -> int:
        return len(self.seen.addresses)


def examine(
    model: Model,
    text: str | Path,
    *,
    name: str,
    by: By = "auto",
    measured: int = 4096,
    shown: int = 256,
    say: Say = lambda _: None,
    progress: bool = True,
) -> Findings:
    """Measure all heads on `measured` tokens of a text, and keep the patterns on the first `shown`.

    A path is that of an image, for a `Vision`.

    `by` says how a head's worth is told: exactly, by ablation, or from one backward pass; "auto"
    ablates where that is no more than `MOST_WORK`.
    """
    for what, count in (("measured", measured), ("shown", shown)):
        if count < 2:
            raise InputError(f"{what}={count} tokens show nothing", "use 2 or more")
    if isinstance(text, Path):
        reading = read_picture(model, name, text)
    else:
        reading = read_text(model, name, text, measured=measured, shown=shown)
    texts = list(reading.measured)
    say(f"1/5 statistics of every head over {_told(reading)}")
    seen = statistics(model, texts, progress=progress)
    say("2/5 what kind of head each is")
    told = kinds(model, texts, sequences=16, progress=progress)
    say("3/5 what the model would lose without each head")
    worth, missing = _worth(model, texts, by, seen.facts["tokens"], progress)
    say("4/5 heads that do the same")
    alike = redundancy(model, texts[:LIKENESS_TEXTS], progress=progress)
    say(f"5/5 where the heads look on {len(reading)} tokens")
    keys = _keys(len(seen.addresses), len(reading))
    largest = top_keys(model, reading.shown, count=keys)
    return Findings(
        name=name,
        model=model,
        reading=reading,
        seen=seen,
        kinds=told,
        worth=worth,
        worth_missing=missing,
        dead=dead_by_statistics(_with_worth(seen, worth)),
        alike=alike,
        largest=largest,
        keys=keys,
    )


def _told(reading: Reading) -> str:
    pieces = f"{counted(len(reading.measured), 'piece')} of the text"
    return pieces if reading.picture is None else f"the {len(reading) - 1} patches of the image"


def _worth(
    model: Model, texts: list[Any], by: By, tokens: int, progress: bool
) -> tuple[Worth | None, str]:
    if by == "none":
        return None, "it was not asked for"
    if isinstance(model, Vision):
        return None, "an image alone does not say what the right class is"
    if model.readout is not None and not isinstance(model.config.readout, LanguageHead):
        return None, "a text alone does not say what the right class is"
    asked = prepare_inputs(model, texts)
    way = _way(model, by, tokens, asked)
    if way == "ablation":
        return _ablated(
            ablate(model, asked.given, metric=asked.metric, targets=asked.targets, shown=progress)
        ), ""
    found = importance(
        model, asked.given, metric=asked.metric, targets=asked.targets, shown=progress
    )
    return _estimated(found), ""


def _way(
    model: Model, by: By, tokens: int, asked: EvaluationInputs
) -> Literal["ablation", "gradient"]:
    if isinstance(asked.metric, Similarity):
        if by == "gradient":
            raise InputError(
                "a model of vectors is most like itself, where all gradients are 0",
                "use --by ablation",
            )
        return "ablation"
    if by in ("ablation", "gradient"):
        return "ablation" if by == "ablation" else "gradient"
    weights = sum(each.numel() for each in model.parameters())
    heads = sum(block.heads for block in blocks_of(model))
    # A head in the middle runs half of the layers anew.
    return "ablation" if heads / 2 * tokens * weights <= MOST_WORK else "gradient"


def _ablated(found: Ablation) -> Worth:
    column = found["change"]
    higher = found.facts["better"] == "higher"
    return Worth(
        loses=-column.means if higher else column.means,
        errors=column.errors,
        metric="likeness" if higher else "loss",
        by="ablation",
        baseline=found.baseline,
        texts=int(found.facts.get("texts", 0)),
    )


def _estimated(found: Importance) -> Worth:
    column = found["predicted"]
    return Worth(
        loses=column.means,
        errors=column.errors,
        metric="loss",
        by="gradient",
        baseline=None,
        texts=int(found.facts["texts"]),
    )


def _with_worth(seen: Statistics, worth: Worth | None) -> ByHead:
    """Statistics with what ablation found beside them, where it is known well enough.

    Neither an estimate nor a change within a large error is ground to call a head dead.
    """
    if worth is None or worth.by != "ablation" or worth.metric != "loss":
        return seen
    known = np.where(worth.errors < LOSS_BELOW, worth.loses, np.nan)
    return ByHead(
        kind="statistics",
        blocks=seen.blocks,
        means={**seen.means, "loss_change": known},
        errors={**seen.errors, "loss_change": worth.errors},
        facts=seen.facts,
    )


def _keys(heads: int, tokens: int) -> int:
    """How many keys a query keeps, so that the file stays small."""
    return max(FEWEST_KEYS, min(MOST_KEYS, MOST_WEIGHTS // (heads * tokens)))
