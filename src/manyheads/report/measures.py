"""The measures that a report shows: in which order, under which names, and how each was made."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import numpy as np
from jaxtyping import Float

from manyheads.report.examine import Findings

__all__ = ["Measure", "measures_of"]

# Told in the table as well; the others only colour the atlas and stand beside a head.
IN_TABLE = (
    "worth",
    "normalized_entropy",
    "max_weight",
    "distance",
    "first_token",
    "previous_token",
    "duplicate_token",
    "induction",
    "output_share",
)
LEFT_OUT = ("previous_token_all_queries", "induction_score", "induction_score_without_first")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measure:
    """One number a head, with its standard error where it is known."""

    name: str
    title: str
    how: str
    share: bool
    in_table: bool
    values: Float[np.ndarray, " h"]
    errors: Float[np.ndarray, " h"]


def measures_of(found: Findings) -> list[Measure]:
    """What the model would lose first, where that is known, then every statistic."""
    told = _told()
    measures = []
    if found.worth is not None:
        measures.append(_worth(found, told["worth"]))
    order = [name for name in told if name in found.seen]
    order += [name for name in found.seen.names if name not in (*told, *LEFT_OUT)]
    for name in order:
        column = found.seen[name]
        if np.isnan(column.means).all():
            continue
        words = told.get(name, {})
        measures.append(
            Measure(
                name=name,
                title=str(words.get("title", name.replace("_", " "))),
                how=str(words.get("how", "Mean over the queries of all pieces of the text.")),
                share=bool(words.get("share", False)),
                in_table=name in IN_TABLE,
                values=column.means,
                errors=column.errors,
            )
        )
    return measures


def _worth(found: Findings, words: Mapping[str, object]) -> Measure:
    worth = found.worth
    assert worth is not None
    title = "loss without it, nats" if worth.metric == "loss" else "likeness lost without it"
    if worth.by == "gradient":
        title += " (estimate)"
    return Measure(
        name="worth",
        title=title,
        how=str(words["how"]),
        share=False,
        in_table=True,
        values=worth.loses,
        errors=worth.errors,
    )


@cache
def _told() -> dict[str, dict[str, object]]:
    written = files("manyheads.report").joinpath("measures.toml").read_text("utf-8")
    return tomllib.loads(written)
