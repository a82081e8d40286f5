"""What a pass over a corpus has added up, and how it reads."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from manyheads.lens.corpus.corpus_watcher import CorpusSums, ExampleSettings
from manyheads.lens.inputs.texts import PassSummary
from manyheads.lens.measure.statistics import Statistics, StatisticsTotals
from manyheads.lens.measure.watcher import MeasurementPlan
from manyheads.models.build import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSettings:
    """How a corpus is read. A pass that goes on must have the same."""

    max_length: int | None
    offsets: tuple[int, ...] = ()
    examples: ExampleSettings = ExampleSettings()


@dataclass(slots=True, eq=False)
class CorpusPass:
    """What has been added up so far."""

    totals: StatisticsTotals
    sums: CorpusSums
    # Texts of whole chunks, and the passages that they were cut into.
    texts: int = 0
    passages: int = 0
    tokens: int = 0
    # Of the texts so far.
    digest: str = ""
    # The passages of the chunk after them that were read before an interruption, and its hash.
    ahead: set[int] = field(default_factory=set)
    ahead_digest: str = ""
    complete: bool = False
    # The first texts, for what is measured on a few.
    first: list[Any] = field(default_factory=list)
    # The token ids of the passages that examples show, for each stack.
    pool: dict[int, dict[str, Int[np.ndarray, " n"]]] = field(default_factory=dict)

    @classmethod
    def begin(cls, settings: PassSettings) -> "CorpusPass":
        return cls(StatisticsTotals(), CorpusSums(settings.examples))

    @property
    def passages_read(self) -> int:
        return self.passages + len(self.ahead)

    def statistics(self, model: Model, plan: MeasurementPlan) -> Statistics:
        summary = PassSummary(self.passages_read, self.tokens, self.complete)
        return self.totals.result(model, plan, summary)

    def forget_unused(self) -> None:
        """Keep only passages that some example shows."""
        books = [sums.book for sums in self.sums.blocks.values()]
        used = {text for book in books for examples in book.stored for text in examples}
        self.pool = {text: ids for text, ids in self.pool.items() if text in used}
