"""Statistics of two models on the same texts, so that the change has an error of its own."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.addresses import Block, blocks_of
from manyheads.lens.classes import TokenClasses
from manyheads.lens.given import Given, climb
from manyheads.lens.measure_table import in_order
from manyheads.lens.observer import Observer
from manyheads.lens.passing import Passed, lead
from manyheads.lens.statistics import ids_by_stack, make_plan
from manyheads.lens.tally import Counted, Tally, summed_by
from manyheads.models.build import Model

__all__ = ["ByText", "measure_by_text"]

Sums = tuple[Float[Tensor, "b h"], Float[Tensor, "b h"]]


@dataclass(slots=True, eq=False)
class _TallyByText(Tally):
    """A tally that keeps the sums and numbers of each text besides."""

    texts: dict[tuple[Block, str], Sums] = field(default_factory=dict)

    def add(self, block: Block, name: str, values: Float[Tensor, "n h"], counted: Counted) -> None:
        Tally.add(self, block, name, values, counted)
        kept = torch.ones_like(values, dtype=torch.bool)
        if counted.kept is not None:
            kept = counted.kept if counted.kept.dim() == 2 else counted.kept[:, None]
            kept = kept.expand_as(values)
        x = torch.where(kept, values.double(), 0.0)
        # Left where they are: to fetch them one by one would wait for the device each time.
        self.texts[block, name] = summed_by(x, counted), summed_by(kept.double(), counted)


@dataclass(slots=True, eq=False)
class ByText:
    """Sums and numbers of every measure, text by text in the order they were read."""

    blocks: tuple[Block, ...]
    tally: Tally = field(default_factory=Tally)
    batches: list[tuple[int, dict[tuple[Block, str], Sums]]] = field(default_factory=list)
    passed: Passed = Passed(0, 0, complete=False)

    @property
    def names(self) -> tuple[str, ...]:
        return in_order(self.tally.names)

    def means(self, name: str) -> Float[np.ndarray, " h"]:
        return self.tally.means(self.blocks, name)

    def errors(self, name: str) -> Float[np.ndarray, " h"]:
        """Over texts, or over the queries of an only text."""
        return self.tally.errors(self.blocks, name, over_sequences=self.passed.texts > 1)

    def residuals(self, name: str) -> Float[np.ndarray, "b h"]:
        """What each text adds to the mean's departure from what it is expected to be.

        (S_b - m N_b) / N of the ratio estimator, whose squares add up to the variance of the mean.
        """
        each = []
        for texts, sums in self.batches:
            device = next(iter(sums.values()))[0].device
            none = torch.zeros(texts, 1, dtype=torch.float64, device=device)
            parts = [
                sums.get((block, name), (none.expand(-1, block.heads),) * 2)
                for block in self.blocks
            ]
            joined = [torch.cat(side, dim=1) for side in zip(*parts, strict=True)]
            each.append(torch.stack(joined).cpu())
        sums, numbers = torch.cat(each, dim=1)
        total = numbers.sum(0)
        return np.asarray(((sums - sums.sum(0) / total * numbers) / total).numpy())


def measure_by_text(
    model: Model,
    given: Given,
    *,
    classes: TokenClasses = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByText:
    """All statistics, each text's apart from the others'."""
    plan = make_plan(model, classes)
    found = ByText(blocks_of(model))

    def visit(some: Given, numbers: list[int]) -> None:
        tally = _TallyByText()
        observer: Any = Observer(plan, ids_by_stack(model, some), numbers)
        observer.tally = tally
        with torch.inference_mode():
            climb(model, some, observer)
        found.tally.merge(tally)
        found.batches.append((len(some), tally.texts))

    found.passed = lead(
        model, given, visit, label="measuring", batch_tokens=batch_tokens, progress=progress
    )
    return found
