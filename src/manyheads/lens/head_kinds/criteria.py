"""From measures to kinds: which score decides, what it must reach, and how that is said."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np
from jaxtyping import Bool, Float

from manyheads.errors import InputError
from manyheads.formatting import percent
from manyheads.lens.head_kinds.labels import Label
from manyheads.lens.head_kinds.patch_attention import Glances
from manyheads.lens.head_kinds.word_targets import Pointed
from manyheads.lens.measure.measures import offset_name
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.by_head import ByHead


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


FloatsByHead = Float[np.ndarray, " h"]
Table = Mapping[str, Threshold]
# Words that a relation must have been asked of.
FEWEST = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Finding:
    """One kind in all heads: scores (NaN where not measured), the least that counts, and words.

    `told` says of the head at a place what was seen; `details` tell kinds of several forms apart.
    Where `holds` is given, a head needs more than its score, and has it there.
    """

    kind: str
    scores: FloatsByHead
    least: FloatsByHead
    told: Callable[[int], str]
    details: Sequence[str] | None = None
    holds: Bool[np.ndarray, " h"] | None = None
    column: str = ""

    @property
    def name(self) -> str:
        """By which the scores are kept."""
        return self.column or self.kind

    def label(self, place: int) -> Label | None:
        """The label of a head that scores more than the least."""
        score, least = float(self.scores[place]), float(self.least[place])
        if not score > least or (self.holds is not None and not self.holds[place]):
            return None
        detail = "" if self.details is None else self.details[place]
        return Label(
            kind=self.kind, score=score, threshold=least, evidence=self.told(place), detail=detail
        )


def label_heads(
    findings: Sequence[Finding], addresses: Sequence[Address], silent: Bool[np.ndarray, " h"]
) -> dict[Address, tuple[Label, ...]]:
    """All labels of each head, best first; a head that writes nothing has none."""
    found = {}
    for place, address in enumerate(addresses):
        mine = [] if silent[place] else [each.label(place) for each in findings]
        labels = [label for label in mine if label is not None]
        found[address] = tuple(sorted(labels, key=lambda label: -label.margin))
    return found


def of_places(
    found: Statistics, even: Mapping[str, FloatsByHead], table: Table, over: str
) -> Iterator[Finding]:
    """Previous, next, self, any other one offset, and sinks."""
    places = {
        "previous-token": ("previous_token", "the previous token"),
        "next-token": ("next_token", "the next token"),
        "self": ("self", "the token itself"),
    }
    for kind, (measure, where) in places.items():
        if measure in found:
            yield _weight(kind, found.means[measure], even.get(measure), table, where, over)
    yield from _other_offsets(found, even, table, over)
    sink, where = found.means["first_token"], "the first token"
    if "on_special" in found and found.class_shares["special"] > 0:
        sink, where = found.means["on_special"], "special tokens"
    yield _weight("sink", sink, even.get("first_token"), table, where, over)


def of_entropy(found: Statistics, table: Table, over: str) -> Finding:
    """Looking at everything alike."""
    share = found.means["normalized_entropy"]

    def told(place: int) -> str:
        return (
            f"spreads its weight: normalized entropy is {percent(float(share[place]))} over {over}"
        )

    least = np.full_like(share, table["broad"].above)
    return Finding(kind="broad", scores=share, least=least, told=told)


def _other_offsets(
    found: Statistics, even: Mapping[str, FloatsByHead], table: Table, over: str
) -> Iterator[Finding]:
    offsets = [int(name.removeprefix("offset")) for name in found.names if name[:6] == "offset"]
    if not offsets:
        return
    values = np.stack([found.means[offset_name(offset)] for offset in offsets])
    best = np.where(np.isnan(values), -1.0, values).argmax(0)
    every = np.arange(values.shape[1])
    none = np.full_like(values, np.nan)
    chance = np.stack(
        [even.get(offset_name(offset), none[0]) for offset in offsets] if even else list(none)
    )
    scores, named = values[best, every], [offsets[place] for place in best]

    def told(place: int) -> str:
        side = "before" if named[place] < 0 else "after"
        where = f"the token {abs(named[place])} {side}"
        return f"puts {percent(float(scores[place]))} of its weight on {where} over {over}"

    yield Finding(
        kind="positional",
        scores=scores,
        least=table["positional"].beside_even(chance[best, every]),
        told=told,
        details=[f"{offset:+d}" for offset in named],
    )


def of_repeats(
    found: Statistics, even: Mapping[str, FloatsByHead], table: Table, over: str
) -> Iterator[Finding]:
    """Duplicate-token and induction heads, on random tokens that are said twice."""
    places = {
        "duplicate-token": ("duplicate_token", "earlier copies of the token"),
        "induction": ("induction", "the token after an earlier copy"),
    }
    for kind, (measure, where) in places.items():
        if measure in found:
            yield _weight(kind, found.means[measure], even.get(measure), table, where, over)


def of_punctuation(found: Statistics, table: Table, over: str) -> Finding:
    share = found.class_shares["punctuation"]
    scores = found.means["on_punctuation"]
    where = f"punctuation, which is {percent(float(share))} of the tokens,"
    return _weight("punctuation", scores, np.full_like(scores, share), table, where, over)


def of_circuits(found: ByHead, table: Table) -> Finding:
    """Copying, from the weights alone; eigenvalues must not say the opposite."""
    words, top = found.facts["words"], found.facts["top_k"]
    chance = np.full_like(found.means["copying"], top / max(1, found.facts["vocabulary"]))
    eigenvalues = found.means["copying_eigenvalues"]
    scores = np.where(eigenvalues > 0, found.means["copying"], 0.0)
    scores = np.where(np.isnan(eigenvalues), np.nan, scores)

    def told(place: int) -> str:
        return (
            f"raises the word it reads into its {top} largest logits for {scores[place]:.2f} of "
            f"{words:,} words, eigenvalue score {eigenvalues[place]:.2f}"
        )

    least = table["copying"].beside_even(chance)
    return Finding(kind="copying", scores=scores, least=least, told=told)


def of_pointing(kind: str, found: Pointed, table: Table, detail: str = "") -> Finding:
    """A kind by the share of words that look at the right word most."""
    known = np.where(found.counts >= FEWEST, found.share, np.nan)
    least = table[kind]

    def told(place: int) -> str:
        fixed = f"{found.fixed[place]:.2f} by {found.choice[place]}"
        return (
            f"looks at the right word most for {found.share[place]:.2f} of "
            f"{found.counts[place]:,.0f} words ({found.task}) against {fixed}, and gives it "
            f"{percent(float(found.weight[place]))} of its weight{beside(place)}"
        )

    def beside(place: int) -> str:
        others = f", all others like it {percent(float(found.rivals[place]))}"
        return others if least.times_rivals else ""

    return Finding(
        kind=kind,
        scores=known,
        least=least.beside_fixed(found.fixed, found.errors),
        told=told,
        holds=least.holds(found.weight, found.rivals),
        details=[detail] * len(known) if detail else None,
        column=f"{kind} {detail}".rstrip(),
    )


def of_glances(found: Glances, table: Table) -> Iterator[Finding]:
    places = {
        "self": "the patch itself",
        "local": "the eight patches around",
        "row": "other patches of its row",
        "column": "other patches of its column",
        "class-token": "the class token",
    }
    for kind, where in places.items():
        over = f"{found.images:,} images"
        yield _weight(kind, found.scores[kind], found.even[kind], table, where, over)


def _weight(
    kind: str, scores: FloatsByHead, even: FloatsByHead | None, table: Table, where: str, over: str
) -> Finding:
    chance = np.full_like(scores, np.nan) if even is None else even

    def told(place: int) -> str:
        return f"puts {percent(float(scores[place]))} of its weight on {where} over {over}"

    return Finding(kind=kind, scores=scores, least=table[kind].beside_even(chance), told=told)
