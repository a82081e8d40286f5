"""Everything that one pass over some texts shows about the heads of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from manyheads.lens.head_kinds.head_tests import OFFSETS
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.labels import MOST_ROWS, Kinds, Label
from manyheads.lens.inputs.batches import gather
from manyheads.lens.inputs.synthetic import own_texts
from manyheads.lens.inputs.texts import Given
from manyheads.lens.measure.measure_table import describe_measure, format_value
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.measure.watcher import Activation
from manyheads.lens.redundant.dead_heads import LOSS_BELOW, Dead, dead_by_statistics
from manyheads.lens.redundant.heads import Double, Redundancy, redundancy
from manyheads.lens.results.addresses import Address, blocks_of, stacks_of
from manyheads.lens.results.by_head import ByHead, FloatsByHead, Tabular
from manyheads.lens.results.files import Facts
from manyheads.models.build import Model
from manyheads.models.vision import Vision
from manyheads.taps import Head, Sublayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Portrait:
    """The kind of a model, how many layers and heads each stack has, and how large it is.

    >>> from manyheads.models.build import build
    >>> print(portray(build("gpt2", layers=2, width=32, heads=4, vocabulary=60, seed=0)))
    A Decoder of 2 layers with 4 heads each: 8 heads, width 32, vocabulary 60, 60,160 parameters.
    """

    type: str
    stacks: dict[str, list[int]]
    width: int
    vocabulary: int | None
    parameters: int

    def __str__(self) -> str:
        layers = "; ".join(
            ("" if name == "main" else f"{name}: ") + _layers(heads)
            for name, heads in self.stacks.items()
        )
        total = sum(sum(heads) for heads in self.stacks.values())
        words = "" if self.vocabulary is None else f"vocabulary {self.vocabulary:,}, "
        article = "An" if self.type[0] in "AEIOU" else "A"
        return (
            f"{article} {self.type} of {layers}: {total:,} heads, width {self.width:,}, "
            f"{words}{self.parameters:,} parameters."
        )


def portray(model: Model) -> Portrait:
    """The facts of a model, told from its configuration."""
    stacks = stacks_of(model)
    heads = {name: [0] * len(stack.config.layers) for name, stack in stacks.items()}
    for block in blocks_of(model):
        heads[block.stack][block.layer] += block.heads
    words = None if isinstance(model, Vision) else model.config.embedding.vocabulary
    return Portrait(
        type=type(model).__name__,
        stacks=heads,
        width=next(iter(stacks.values())).config.width,
        vocabulary=words,
        parameters=sum(each.numel() for each in model.parameters()),
    )


def _layers(heads: list[int]) -> str:
    """
    >>> _layers([4, 4]), _layers([4, 3, 0]), _layers([4])
    ('2 layers with 4 heads each', '3 layers with 0 to 4 heads', '1 layer with 4 heads')
    """
    if len(heads) == 1:
        return f"1 layer with {heads[0]} heads"
    if min(heads) == max(heads):
        return f"{len(heads)} layers with {heads[0]} heads each"
    return f"{len(heads)} layers with {min(heads)} to {max(heads)} heads"


KIND = "inspection"
# The measures that a terminal has room for.
SHOWN = (
    "normalized_entropy",
    "effective_keys",
    "distance",
    "first_token",
    "previous_token",
    "induction",
    "output_share",
)
MOST_KINDS = 2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadImportance:
    """How much worse a model does without each head: positive where it needs the head.

    `change` is a rise of the loss in nats per token, or a drop of the similarity of text vectors,
    as `metric` says; `by` says whether each head was ablated, or its effect estimated from one
    backward pass.
    """

    change: FloatsByHead
    errors: FloatsByHead
    metric: Literal["loss", "similarity"]
    by: Literal["ablation", "gradient"]
    baseline: float | None
    texts: int

    @property
    def measure(self) -> str:
        """The key of the measure, as in the table of measures."""
        return "loss_change" if self.metric == "loss" else "similarity_drop"

    @property
    def harmful(self) -> list[int]:
        """Heads, by position, without which the model does better beyond two standard errors."""
        found = np.flatnonzero(-self.change > 2 * self.errors)
        return sorted(found.tolist(), key=lambda place: self.change[place])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Inspection(Tabular):
    """What a model is, and the statistics, kinds, sinks, dead and duplicate heads it has.

    `kinds` is None and `redundancy` empty where the measurement was interrupted before them; there
    is one `Redundancy` per stack and sublayer. `importance` is None unless it was measured:
    `manyheads report` does.
    """

    model: Portrait
    statistics: Statistics
    kinds: Kinds | None = None
    redundancy: tuple[Redundancy, ...] = ()
    importance: HeadImportance | None = None
    facts: Facts = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.statistics.addresses

    @property
    def complete(self) -> bool:
        """False where the measurement was interrupted."""
        return bool(self.facts["complete"])

    @property
    def dead(self) -> Dead:
        """By entropy and norm, and by ablation where `importance` comes from it."""
        return dead_by_statistics(self._with_loss_change())

    @property
    def sinks(self) -> list[tuple[Address, float]]:
        """Heads with a sink at the first token of some text, by their mean weight on it."""
        share = dict(self.statistics["sink"].items()) if "sink" in self.statistics else {}
        ranked = self.statistics["first_token"].ranked() if share else []
        return [(address, weight) for address, weight in ranked if share[address] > 0]

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The largest value of the residual stream after each layer."""
        return self.statistics.activations

    @property
    def doubles(self) -> tuple[Double, ...]:
        """Pairs of heads with the same patterns and the same outputs."""
        return tuple(double for each in self.redundancy for double in each.doubles)

    @property
    def duplicates(self) -> dict[Address, list[Address]]:
        """The heads of such pairs, each with its duplicates."""
        found: dict[Address, list[Address]] = {}
        for double in self.doubles:
            found.setdefault(double.one, []).append(double.other)
            found.setdefault(double.other, []).append(double.one)
        return found

    @property
    def clusters(self) -> tuple[tuple[Address, ...], ...]:
        return tuple(group for each in self.redundancy for group in each.clusters)

    def labels(self, head: Head | Address) -> tuple[Label, ...]:
        return () if self.kinds is None else self.kinds.of(head)

    def best_kind(self, head: Head | Address) -> str:
        """The kind that fits a head best, "mixed" where none does."""
        return "–" if self.kinds is None else self.kinds.best(head)

    def flags(self) -> dict[Address, list[str]]:
        """What is wrong with each head, if anything: dead, harmful, duplicate."""
        harmful = () if self.importance is None else self.importance.harmful
        known = {
            "dead": self.dead.heads,
            "harmful": [self.addresses[place] for place in harmful],
            "duplicate": self.duplicates,
        }
        return {
            head: [flag for flag, heads in known.items() if head in heads]
            for head in self.addresses
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: statistics, importance, kinds, why it is dead, its duplicates."""
        reasons, duplicates = self.dead.reasons, self.duplicates
        rows = self.statistics.rows()
        for place, (head, row) in enumerate(zip(self.addresses, rows, strict=True)):
            if self.importance is not None:
                name = self.importance.measure
                row[name] = float(self.importance.change[place])
                row[f"{name}_error"] = float(self.importance.errors[place])
                row["harmful"] = place in self.importance.harmful
            row["kinds"] = ", ".join(label.name for label in self.labels(head))
            row["dead"] = ", ".join(reasons.get(head, ()))
            row["duplicates"] = ", ".join(map(str, duplicates.get(head, [])))
        return rows

    def table(self, *, max_rows: int | None = MOST_ROWS) -> Any:
        """A rich table: every head, its best kinds and the most telling measures."""
        from rich.table import Table

        about = {name: describe_measure(name) for name in SHOWN if name in self.statistics}
        reasons, duplicates = self.dead.reasons, self.duplicates
        table = Table("Head", "Kinds", box=None, pad_edge=False)
        for each in about.values():
            table.add_column(each.title, justify="right")
        table.add_column("")
        for head in self.addresses[:max_rows]:
            values = self.statistics.of(head)
            cells = [format_value(values[name], each.unit) for name, each in about.items()]
            remarks = [f"dead by {why}" for why in reasons.get(head, ())]
            remarks += [f"duplicate of {other}" for other in duplicates.get(head, [])]
            table.add_row(str(head), self._kinds_of(head), *cells, ", ".join(remarks))
        if max_rows is not None and len(self.addresses) > max_rows:
            table.caption = (
                f"{len(self.addresses) - max_rows} more heads: table(max_rows=None) or save()"
            )
            table.caption_justify = "left"
        return table

    def _summary(self) -> Facts:
        return {
            "heads": [str(head) for head in self.addresses],
            "sinks": {str(head): weight for head, weight in self.sinks},
            "dead": {str(head): list(why) for head, why in self.dead.reasons.items()},
            "doubles": [[str(each.one), str(each.other)] for each in self.doubles],
            "clusters": [[str(head) for head in group] for group in self.clusters],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        facts = self.statistics.facts
        yield f"{self.model} Read: {facts['texts']:,} texts, {facts['tokens']:,} tokens."
        if self.kinds is not None:
            yield str(self.kinds)
        yield f"{len(self.sinks)} heads have a sink at the first token of some text"
        yield str(self.dead)
        for each in self.redundancy:
            yield str(each)
        if not self.complete:
            yield "interrupted before everything was measured"

    def _kinds_of(self, head: Address) -> str:
        labels = self.labels(head)
        more = f" and {len(labels) - MOST_KINDS} more" if len(labels) > MOST_KINDS else ""
        return ", ".join(map(str, labels[:MOST_KINDS])) + more or self.best_kind(head)

    def _with_loss_change(self) -> ByHead:
        """The statistics with the loss change of ablation, where it is known well enough.

        Neither an estimate nor a change with a large error is a reason to call a head dead.
        """
        seen, importance = self.statistics, self.importance
        if importance is None or (importance.by, importance.metric) != ("ablation", "loss"):
            return seen
        known = np.where(importance.errors < LOSS_BELOW, importance.change, np.nan)
        return ByHead(
            kind=seen.kind,
            blocks=seen.blocks,
            means={**seen.means, "loss_change": known},
            errors={**seen.errors, "loss_change": importance.errors},
            facts=seen.facts,
        )


def inspect(
    model: Model,
    texts: Any = None,
    *,
    sequences: int = 64,
    seed: int = 0,
    redundancy_texts: int | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Inspection:
    """Inspect every head of a model: statistics, kinds, sinks, dead and duplicate heads.

    Texts are as for `statistics`; by default the model reads short articles that come with the
    package (a `Seq2Seq` as source and target at once), or random images if it is a `Vision`. They
    are read once for statistics, positional kinds, sinks and dead heads, and once each for the
    patterns and the outputs that heads share (see `redundancy`; `redundancy_texts` limits it to the
    first texts); kinds add `sequences` of random tokens (see `kinds`). `on_progress` receives the
    name of each step.

    Ctrl-C ends the measurement and keeps what was measured.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    >>> found = inspect(model, [[5, 6, 7, 5, 6], [8, 9, 10]], sequences=2)
    >>> [str(head) for head in found.dead.heads]
    ['L0H0', 'L0H1']
    """
    given = gather(model, own_texts(model, seed) if texts is None else texts)
    offsets = () if isinstance(model, Vision) else OFFSETS
    shared: dict[str, Any] = {"batch_tokens": batch_tokens, "progress": progress}
    on_progress("head statistics")
    seen = statistics(model, given, offsets=offsets, **shared)
    complete, found, alike = seen.complete, None, []
    try:
        if complete:
            on_progress("head kinds")
            read = given if isinstance(model, Vision) else seen
            found = kinds(model, read, sequences=sequences, seed=seed, progress=progress)
            complete = found.complete
        on_progress("duplicate heads")
        few = given if redundancy_texts is None else _first(given, redundancy_texts)
        for stack, sublayer in _parts(seen) if complete else ():
            each = redundancy(model, few, stack=stack, sublayer=sublayer, **shared)
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


def _first(given: Given, texts: int) -> Given:
    return given.select(range(min(texts, len(given))))


def _parts(seen: Statistics) -> list[tuple[Any, Sublayer]]:
    return list(dict.fromkeys((block.stack, block.sublayer) for block in seen.blocks))
