"""Texts led past a model batch by batch; Ctrl-C ends the way and keeps what was seen on it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from manyheads.encoding.batches import fill
from manyheads.errors import InputError
from manyheads.lens.given import Given, read
from manyheads.lens.statistics import BATCH_TOKENS, portions
from manyheads.lens.storing import Facts
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.progress import Progress

__all__ = ["Passed", "gather", "lead"]


@dataclass(frozen=True, slots=True)
class Passed:
    """How many texts and tokens (or patches) were seen, and whether those were all."""

    texts: int
    tokens: int
    complete: bool

    @property
    def facts(self) -> Facts:
        return {"texts": self.texts, "tokens": self.tokens, "complete": self.complete}


def gather(model: Model, texts: Any) -> Given:
    """Texts that are read more than once, be they an iterator."""
    if isinstance(texts, str):
        texts = [texts]
    elif isinstance(texts, Iterator):
        texts = list(texts)
    return read(model, texts)


def lead(
    model: Model,
    texts: Any,
    visit: Callable[[Given, list[int]], None],
    *,
    label: str,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Passed:
    """Call `visit` with each batch and the numbers of its texts; it adds a batch wholly or not."""
    device = next(model.parameters()).device
    most = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])
    if most < 1:
        raise InputError(f"batch_tokens={most} holds no token", "use 1 or more")
    total = len(texts) if hasattr(texts, "__len__") and not isinstance(texts, str) else None
    seen = tokens = first = 0
    with Progress(label, total=total, unit="texts", shown=progress) as bar, resting(model):
        try:
            for portion in portions(texts):
                given = read(model, portion)
                sizes = given.sizes(model)
                for places in fill(sizes, most):
                    visit(given.select(places), [first + place for place in places])
                    seen += len(places)
                    tokens += sum(sizes[place] for place in places)
                    bar.advance(len(places))
                first += len(given)
        except KeyboardInterrupt:
            if not seen:
                raise
            return Passed(seen, tokens, complete=False)
    if seen == 0:
        raise InputError("there is no text", "give at least one")
    return Passed(seen, tokens, complete=True)
