"""What a head must score to be given a kind: one table, `kinds.toml`, with its sources."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np
from jaxtyping import Bool, Float

from manyheads.errors import InputError

__all__ = ["Threshold", "threshold_table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The least score of a kind: `above`, or what stands beside it where that is more.

    `times_even` is so many times the score of a head that looks at all it may see alike, and
    `over_fixed` so much more than the best fixed choice. Beside its score a head must give what is
    right `weight` of its weight, and `times_rivals` times what its rivals get together. `source`
    says where they come from.
    """

    above: float
    times_even: float = 0.0
    over_fixed: float = 0.0
    weight: float = 0.0
    times_rivals: float = 0.0
    source: str = ""

    def beside_even(self, even: Float[np.ndarray, " h"]) -> Float[np.ndarray, " h"]:
        """The least score of each head, from what an even head would have in its place."""
        return np.fmax(self.above, self.times_even * even)

    def beside_fixed(
        self, fixed: Float[np.ndarray, " h"], errors: Float[np.ndarray, " h"]
    ) -> Float[np.ndarray, " h"]:
        """The least score beside a fixed choice; three standard errors above it at the least."""
        return np.fmax(self.above, fixed + np.fmax(self.over_fixed, 3 * errors))

    def holds(
        self, weight: Float[np.ndarray, " h"], rivals: Float[np.ndarray, " h"]
    ) -> Bool[np.ndarray, " h"]:
        """Whether each head gives enough to what is right, in itself and beside the rivals."""
        return (weight >= self.weight) & (weight >= self.times_rivals * rivals)


@cache
def _table() -> dict[str, Threshold]:
    written = tomllib.loads(files(__package__).joinpath("kinds.toml").read_text("utf-8"))
    return {
        kind: Threshold(source=numbers.pop("from"), **numbers) for kind, numbers in written.items()
    }


def threshold_table(changes: Mapping[str, int | float] | None = None) -> dict[str, Threshold]:
    """The table by kind, with some of its least scores changed.

    >>> threshold_table()["previous-token"].above, threshold_table({"sink": 0.5})["sink"].above
    (0.5, 0.5)
    """
    found = dict(_table())
    for kind, above in (changes or {}).items():
        if kind not in found:
            raise InputError(f"no kind of head is called {kind!r}", f"use {', '.join(found)}")
        if not 0 <= above <= 1:
            raise InputError(f"a threshold of {above} for {kind} is no share", "use 0 to 1")
        found[kind] = replace(found[kind], above=above, source="given")
    return found
