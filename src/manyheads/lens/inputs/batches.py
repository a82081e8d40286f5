"""Batches of texts for a model to read; Ctrl-C ends the run and keeps what was seen before it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import Tensor

from manyheads.encoding.text_reader import fill
from manyheads.errors import InputError
from manyheads.lens.inputs.texts import Given, read
from manyheads.lens.results.files import Facts
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.ragged import Ragged

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
# Texts that are tokenised and sorted by length together.
TEXTS_AT_ONCE = 1024


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
    """Texts that are read more than once, from an iterator too."""
    if isinstance(texts, str):
        texts = [texts]
    elif isinstance(texts, Iterator):
        texts = list(texts)
    return read(model, texts)


def streaming_batch_tokens(model: Model) -> int:
    """How many tokens are read at once on the device of the model."""
    device = next(model.parameters()).device
    return BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])


def lead(
    model: Model,
    texts: Any,
    visit: Callable[[Given, list[int]], None],
    *,
    label: str,
    unit: str = "texts",
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Passed:
    """Call `visit` with each batch and the numbers of its texts.

    A batch that Ctrl-C interrupts does not count: `visit` adds it to its result as a whole.
    """
    largest = streaming_batch_tokens(model) if batch_tokens is None else batch_tokens
    if largest < 1:
        raise InputError(f"batch_tokens must be at least 1, got {largest}", "use 1 or more")
    total = len(texts) if hasattr(texts, "__len__") and not isinstance(texts, str) else None
    seen = tokens = first = 0
    with Progress(label, total=total, unit=unit, enabled=progress) as bar, resting(model):
        try:
            for portion in _portions(texts):
                given = read(model, portion)
                sizes = given.sizes(model)
                for places in fill(sizes, largest):
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


def _portions(texts: Any) -> Iterator[Any]:
    """Texts as they come, some at a time; a batch that is one object already stays whole."""
    if isinstance(texts, str):
        yield [texts]
    elif isinstance(texts, Given | Ragged | Tensor) or _pair_of_ragged(texts):
        yield texts
    else:
        rest = iter(texts)
        while some := list(islice(rest, TEXTS_AT_ONCE)):
            yield some


def _pair_of_ragged(texts: Any) -> bool:
    return isinstance(texts, tuple) and bool(texts) and isinstance(texts[0], Ragged)
