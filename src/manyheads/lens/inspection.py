"""Everything that can be told of the heads of a model from one reading of some texts."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.lens.addresses import Address, Block
from manyheads.lens.dead import Dead, dead_by_statistics
from manyheads.lens.kinds import kinds
from manyheads.lens.labels import MOST_ROWS, Kinds, Label
from manyheads.lens.observer import Activation
from manyheads.lens.passages import own_texts
from manyheads.lens.passing import gather
from manyheads.lens.portrait import Portrait, portray
from manyheads.lens.redundancy import SIDES, Double, Redundancy, redundancy
from manyheads.lens.results import ByHead, frame_of
from manyheads.lens.statistics import Statistics, statistics
from manyheads.lens.storing import Arrays, Facts, read_result, write_result
from manyheads.lens.trials import OFFSETS
from manyheads.models.build import Model
from manyheads.models.vision import Vision
from manyheads.taps import Head, Sublayer

__all__ = ["Inspection", "inspect"]

KIND = "inspection"
# What a page has room for, of all that was measured.
SHOWN = {
    "normalized_entropy": "entropy share",
    "effective_keys": "keys",
    "distance": "distance",
    "first_token": "first token",
    "previous_token": "previous_token",
    "induction": "induction",
    "output_share": "writes",
}
MOST_KINDS = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Inspection:
    """What a model is, and of its heads statistics, kinds, sinks, the dead and the doubled.

    `kinds` is None and `redundancy` empty where the measuring was broken off before them; there is
    one `Redundancy` for each attention that heads are counted in.
    """

    model: Portrait
    statistics: Statistics
    kinds: Kinds | None = None
    redundancy: tuple[Redundancy, ...] = ()
    facts: Facts = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.statistics.addresses

    @property
    def complete(self) -> bool:
        """False where the measuring was broken off."""
        return bool(self.facts["complete"])

    @property
    def dead(self) -> Dead:
        """By entropy and norm; what ablation says of them is for `lens.dead`."""
        return dead_by_statistics(self.statistics)

    @property
    def sinks(self) -> list[tuple[Address, float]]:
        """Heads that rest on the first token in some text, with their weight there, by it."""
        share = dict(self.statistics["sink"].items()) if "sink" in self.statistics else {}
        ranked = self.statistics["first_token"].ranked() if share else []
        return [(address, weight) for address, weight in ranked if share[address] > 0]

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The largest value of the residual stream after each layer."""
        return self.statistics.activations

    @property
    def doubles(self) -> tuple[Double, ...]:
        """Pairs of heads that look at the same and write the same."""
        return tuple(double for each in self.redundancy for double in each.doubles)

    @property
    def clusters(self) -> tuple[tuple[Address, ...], ...]:
        return tuple(group for each in self.redundancy for group in each.clusters)

    def labels(self, head: Head | Address) -> tuple[Label, ...]:
        return () if self.kinds is None else self.kinds.of(head)

    def rows(self) -> list[dict[str, Any]]:
        """One record a head: its statistics, its kinds, why it is dead, and what it doubles."""
        reasons, doubled = self.dead.reasons, self._doubled()
        return [
            row
            | {
                "kinds": ", ".join(label.name for label in self.labels(head)),
                "dead": ", ".join(reasons.get(head, ())),
                "doubles": ", ".join(map(str, doubled.get(head, []))),
            }
            for head, row in zip(self.addresses, self.statistics.rows(), strict=True)
        ]

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return frame_of(self.rows())

    def table(self, *, most: int | None = MOST_ROWS) -> Any:
        """A rich table: every head, its best kinds and the measures that tell most."""
        from rich.table import Table

        names = [name for name in SHOWN if name in self.statistics]
        reasons, doubled = self.dead.reasons, self._doubled()
        table = Table("head", "kinds", box=None, pad_edge=False)
        for name in names:
            table.add_column(SHOWN[name], justify="right")
        table.add_column("")
        for head in self.addresses[:most]:
            values = self.statistics.of(head)
            told = [_number(values[name]) for name in names]
            remark = [f"dead by {why}" for why in reasons.get(head, ())]
            remark += [f"as {other}" for other in doubled.get(head, [])]
            table.add_row(str(head), self._kinds_of(head), *told, ", ".join(remark))
        if most is not None and len(self.addresses) > most:
            table.caption = f"{len(self.addresses) - most} more heads: table(most=None) or save()"
            table.caption_justify = "left"
        return table

    def save(self, path: Path | str) -> None:
        """To JSON or safetensors, by the ending; written whole or not at all."""
        arrays: Arrays = {}
        _pack(arrays, "statistics", self.statistics)
        blocks = self.statistics.blocks
        facts: Facts = {
            "heads": [str(head) for head in self.addresses],
            "blocks": [_described(block) for block in blocks],
            "model": asdict(self.model),
            "statistics": self.statistics.facts,
            "sinks": {str(head): weight for head, weight in self.sinks},
            "dead": {str(head): list(why) for head, why in self.dead.reasons.items()},
            "doubles": [[str(each.one), str(each.other)] for each in self.doubles],
            "clusters": [[str(head) for head in group] for group in self.clusters],
            "facts": self.facts,
        }
        if self.kinds is not None:
            _pack(arrays, "kinds", self.kinds.scores)
            listed = [[asdict(label) for label in mine] for mine in self.kinds.labels.values()]
            facts["kinds"] = {"labels": listed, "facts": self.kinds.facts}
        facts["redundancy"] = []
        for place, each in enumerate(self.redundancy):
            arrays |= {f"redundancy/{place}/{side}": each.likeness[side] for side in SIDES}
            about: Facts = {"double_above": each.double_above, "cluster_above": each.cluster_above}
            about |= {"by": each.by, "facts": each.facts}
            facts["redundancy"].append(
                about | {"blocks": [_described(block) for block in each.blocks]}
            )
        write_result(path, KIND, arrays, facts)

    @classmethod
    def load(cls, path: Path | str) -> "Inspection":
        arrays, facts = read_result(path, KIND)
        blocks = tuple(map(_block, facts["blocks"]))
        seen = Statistics(
            kind="statistics",
            blocks=blocks,
            means=_under("statistics/means/", arrays),
            errors=_under("statistics/errors/", arrays),
            facts=facts["statistics"],
        )
        found = None
        if "kinds" in facts:
            means = _under("kinds/means/", arrays)
            scores = ByHead(kind="scores of kinds", blocks=blocks, means=means)
            mine = [tuple(Label(**each) for each in some) for some in facts["kinds"]["labels"]]
            labels = dict(zip(seen.addresses, mine, strict=True))
            found = Kinds(labels=labels, scores=scores, facts=facts["kinds"]["facts"])
        alike = tuple(
            Redundancy(
                likeness={side: arrays[f"redundancy/{place}/{side}"] for side in SIDES},
                **about | {"blocks": tuple(map(_block, about["blocks"]))},
            )
            for place, about in enumerate(facts["redundancy"])
        )
        return cls(
            model=Portrait(**facts["model"]),
            statistics=seen,
            kinds=found,
            redundancy=alike,
            facts=facts["facts"],
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        facts = self.statistics.facts
        yield f"{self.model} Read: {facts['texts']:,} texts, {facts['tokens']:,} tokens."
        if self.kinds is not None:
            yield str(self.kinds)
        yield f"{len(self.sinks)} heads rest on the first token in some text"
        yield str(self.dead)
        for each in self.redundancy:
            yield str(each)
        if not self.complete:
            yield "broken off before all was measured"

    def _kinds_of(self, head: Address) -> str:
        if self.kinds is None:
            return "-"
        labels = self.labels(head)
        more = f" and {len(labels) - MOST_KINDS} more" if len(labels) > MOST_KINDS else ""
        return ", ".join(map(str, labels[:MOST_KINDS])) + more or self.kinds.best(head)

    def _doubled(self) -> dict[Address, list[Address]]:
        found: dict[Address, list[Address]] = {}
        for double in self.doubles:
            found.setdefault(double.one, []).append(double.other)
            found.setdefault(double.other, []).append(double.one)
        return found


def inspect(
    model: Model,
    texts: Any = None,
    *,
    sequences: int = 64,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Inspection:
    """Look at every head of a model: statistics, kinds, sinks, the dead and the doubled.

    Texts are as for `statistics`; without any, short articles of our own are read, each by a
    `Seq2Seq` as source and target at once, and random images by a `Vision`. They are read once for
    statistics, kinds by place, sinks and the dead, and once each for what heads look at and what
    they write in common (see `redundancy`); kinds add `sequences` made here (see `kinds`).

    Ctrl-C ends the measuring and keeps what was measured.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    >>> found = inspect(model, [[5, 6, 7, 5, 6], [8, 9, 10]], sequences=2)
    >>> [str(head) for head in found.dead.heads]
    ['L0H0', 'L0H1']
    """
    given = gather(model, own_texts(model, seed) if texts is None else texts)
    offsets = () if isinstance(model, Vision) else OFFSETS
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    seen = statistics(model, given, offsets=offsets, **shared)
    complete, found, alike = seen.complete, None, []
    try:
        if complete:
            read = given if isinstance(model, Vision) else seen
            found = kinds(model, read, sequences=sequences, seed=seed, progress=progress)
            complete = found.complete
        for stack, sublayer in _parts(seen) if complete else ():
            each = redundancy(model, given, stack=stack, sublayer=sublayer, **shared)
            alike.append(each)
            complete &= bool(each.facts["complete"])
    except KeyboardInterrupt:
        complete = False
    return Inspection(
        model=portray(model),
        statistics=seen,
        kinds=found,
        redundancy=tuple(alike),
        facts={"complete": complete, "seed": seed, "own_texts": texts is None},
    )


def _parts(seen: Statistics) -> list[tuple[Any, Sublayer]]:
    return list(dict.fromkeys((block.stack, block.sublayer) for block in seen.blocks))


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3g}"


def _pack(arrays: Arrays, prefix: str, result: ByHead) -> None:
    arrays |= {f"{prefix}/means/{name}": values for name, values in result.means.items()}
    arrays |= {f"{prefix}/errors/{name}": values for name, values in result.errors.items()}


def _under(prefix: str, arrays: Arrays) -> Arrays:
    return {
        name.removeprefix(prefix): each for name, each in arrays.items() if name.startswith(prefix)
    }


def _described(block: Block) -> list[Any]:
    return [block.layer, block.heads, block.stack, block.sublayer.value]


def _block(described: list[Any]) -> Block:
    layer, heads, stack, sublayer = described
    return Block(layer, heads, stack, Sublayer(sublayer))
