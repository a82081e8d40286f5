"""What the studio can do with its models, one method a question; all of it runs on one thread."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.sampling import Greedy, Sample
from manyheads.errors import InputError
from manyheads.lens.causal.patching import patch
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs.cached_run import Change
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.measure.measure_table import describe_measure
from manyheads.lens.measure.statistics import statistics
from manyheads.studio import views
from manyheads.studio.generation import WatchedGeneration
from manyheads.studio.kept_run import Memory, Reading, Stopped, take
from manyheads.studio.models import Book, Shelf, Text
from manyheads.studio.requests import LIMITS, Asked, Edit
from manyheads.taps import Head, Site, Tap


def changes_of(
    edit: Edit, whole: Reading, other: Callable[[], Reading] | None
) -> dict[Site, Change]:
    """What to put in the place of heads' outputs.

    "mean" is a head's mean over the tokens of this text, as `lens.ablate` takes it over all texts.
    `other` runs the text that patched heads come from; it must have as many tokens.
    """
    whole.check((*edit.off, *edit.patched))
    source = other() if edit.patched and other is not None else None
    if source is not None and source.length != whole.length:
        raise InputError(
            f"the other prompt has {source.length} tokens and this one {whole.length}",
            "change it word by word until both have as many",
        )
    found: dict[Site, Change] = {}
    for layer in sorted({head.layer for head in (*edit.off, *edit.patched)}):
        off, patched = _of_layer(edit.off, layer), _of_layer(edit.patched, layer)
        instead = whole.means[layer][off] if edit.how == "mean" else None
        given = None if source is None or not patched else source.outputs[layer][:, patched]
        found[Site(layer, Tap.HEAD_OUTPUT)] = _change(off, instead, patched, given)
    return found


def _of_layer(heads: tuple[Head, ...], layer: int) -> list[int]:
    return [head.head for head in heads if head.layer == layer]


def _change(
    off: list[int], instead: Tensor | None, patched: list[int], given: Tensor | None
) -> Change:
    def change(values: Tensor) -> Tensor:
        changed = torch.clone(values)
        if off:
            changed[:, off] = 0.0 if instead is None else instead
        if given is not None:
            changed[:, patched] = given
        return changed

    return change


class Desk:
    """The shelf and what was read from it lately.

    Every question names the model and gives the text again: the server holds no state of a page,
    so that any number of pages can ask, and one that is gone leaves nothing behind.
    """

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self.memory = Memory(LIMITS.kept_bytes)
        self._atlases: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._kinds: dict[str, dict[str, Any]] = {}

    def models(self) -> dict[str, Any]:
        return {
            "models": [book.described() for book in self.shelf.books.values()],
            "limits": {"heads": LIMITS.heads, "max_new_tokens": LIMITS.max_new_tokens},
        }

    def read(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """The tokens of a text."""
        asked.allow("model", "text", "image", "edit")
        book, text = self._open(asked)
        return views.opened(book, text, self._reading(book, text, asked.edit(), stopped))

    def atlas(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """Every statistic of every head on a text."""
        asked.allow("model", "text", "image")
        book, text = self._open(asked)
        if text.key not in self._atlases:
            if stopped():
                return {}
            most = LIMITS.atlas_tokens
            found = statistics(book.model, text.beginning(most).given, progress=False)
            while len(self._atlases) >= 16:
                self._atlases.pop(next(iter(self._atlases)))
            self._atlases[text.key] = {
                "tokens": min(len(text), most),
                "heads": [str(address) for address in found.addresses],
                "statistics": {
                    name: [views.rounded(value) for value in found[name].means.tolist()]
                    for name in found.names
                },
                "measures": {
                    name: asdict(describe_measure(name)) for name in (*found.names, "patching")
                },
            }
        return self._atlases[text.key]

    def kinds(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """What every head is called, told once for a model: it is tried on texts of its own."""
        asked.allow("model")
        book = self.shelf[asked.word("model")]
        if book.name not in self._kinds:
            if stopped():
                return {}
            found = kinds(book.model, sequences=LIMITS.kind_sequences, progress=False)
            self._kinds[book.name] = {
                str(address): [
                    {"name": each.name, "score": views.rounded(each.score), "seen": each.evidence}
                    for each in labels
                ]
                for address, labels in found.labels.items()
            }
        return {"heads": self._kinds[book.name]}

    def look(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """Where one token looks."""
        reading, heads, at, count = self._at_a_token(asked, stopped)
        return views.looks(reading, heads, at, count, stopped)

    def lookers(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """Who looks at one token."""
        reading, heads, at, count = self._at_a_token(asked, stopped)
        return views.lookers(reading, heads, at, count, stopped)

    def rows(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """A run of queries, each with the keys it looks at most."""
        asked.allow("model", "text", "image", "edit", "heads", "rows", "count")
        book, text = self._open(asked)
        span = asked.span("rows", len(text), LIMITS.rows)
        count = asked.number("count", 1, LIMITS.keys, 12)
        reading = self._reading(book, text, asked.edit(), stopped)
        return views.rows(reading, asked.heads(), span, count, stopped)

    def map(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """A window of patterns, or all of them drawn small."""
        asked.allow("model", "text", "image", "edit", "heads", "rows", "keys", "cells")
        book, text = self._open(asked)
        span = asked.span("rows", len(text), LIMITS.tokens)
        keys = asked.span("keys", len(text), LIMITS.tokens)
        cells = asked.number("cells", 1, LIMITS.cells, 256)
        reading = self._reading(book, text, asked.edit(), stopped)
        heads = reading.check(asked.heads())
        drawn = [views.head_map(reading, head, span, keys, cells, stopped) for head in heads]
        return {"maps": drawn}

    def answers(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """What the model says at a place, and said with all its heads."""
        asked.allow("model", "text", "image", "edit", "at", "count")
        book, text = self._open(asked)
        at = asked.number("at", 0, len(text) - 1, len(text) - 1)
        count = asked.number("count", 1, LIMITS.answers, 8)
        edit = asked.edit()
        reading = self._reading(book, text, edit, stopped)
        before = None if edit.empty else self._reading(book, text, Edit(), stopped)
        return views.answers(book, reading, at, count, before)

    def patch(self, asked: Asked, stopped: Stopped) -> dict[str, Any]:
        """How much of another prompt's answer each head alone brings into this one.

        The metric is the difference of two logits after the last token: the other prompt's
        likeliest answer less this one's.
        """
        asked.allow("model", "text", "source")
        book, text = self._open(asked)
        other = book.read_text(asked.text("source"))
        if book.answers != "next":
            raise InputError(f"{book.name} writes no next token", "use a model that does")
        if max(len(text), len(other)) > LIMITS.patched_tokens:
            raise InputError(
                f"the prompts have {max(len(text), len(other)):,} tokens",
                f"patch prompts of {LIMITS.patched_tokens} at most",
            )
        if len(text) != len(other):
            raise InputError(
                f"the other prompt has {len(other)} tokens and this one {len(text)}",
                "change it word by word until both have as many",
            )
        right, wrong = (self._likeliest(book, each, stopped) for each in (other, text))
        if right == wrong:
            raise InputError(
                f"both prompts are answered with {book.word(right)!r}",
                "change something that the answer depends on",
            )
        metric = LogitDifference(answer=(right,), distractor=(wrong,))
        found = patch(book.model, other.given, text.given, metric, progress=False)
        return {
            "right": book.word(right),
            "wrong": book.word(wrong),
            "clean": views.rounded(found.clean),
            "corrupted": views.rounded(found.corrupted),
            "heads": [f"L{each.layer}H{each.head}" for each in found.shares],
            "shares": [views.rounded(share) for share in found.shares.values()],
        }

    def writer(self, asked: Asked, stopped: Stopped) -> WatchedGeneration:
        """A text about to be generated."""
        asked.allow("model", "text", "edit", "heads", "max_new_tokens", "temperature", "seed")
        book, text = self._open(asked)
        if not book.writes:
            raise InputError(f"{book.name} cannot generate text", "use a decoder")
        edit, temperature = asked.edit(), asked.real("temperature", 0.0, 10.0, 0.0)
        if edit.patched:
            raise InputError(
                "patched heads stand at the tokens of a prompt and cannot write on",
                "take the patch away first",
            )
        whole = self._reading(book, text, Edit(), stopped)
        config = GenerationConfig(
            max_new_tokens=asked.number("max_new_tokens", 1, LIMITS.max_new_tokens, 24),
            sampling=Sample(temperature=temperature) if temperature > 0 else Greedy(),
            seed=asked.number("seed", 0, 2**31, 0),
        )
        return WatchedGeneration(
            book,
            text,
            config,
            heads=whole.check(asked.heads()),
            changes=changes_of(edit, whole, None),
        )

    def _at_a_token(
        self, asked: Asked, stopped: Stopped
    ) -> tuple[Reading, tuple[Head, ...], int, int]:
        asked.allow("model", "text", "image", "edit", "heads", "at", "count")
        book, text = self._open(asked)
        at = asked.number("at", 0, len(text) - 1)
        count = asked.number("count", 1, LIMITS.keys, 24)
        return self._reading(book, text, asked.edit(), stopped), asked.heads(), at, count

    def _open(self, asked: Asked) -> tuple[Book, Text]:
        book, pixels = self.shelf[asked.word("model")], asked.pixels()
        return book, book.read_text(asked.text()) if pixels is None else book.read_image(pixels)

    def _reading(self, book: Book, text: Text, edit: Edit, stopped: Stopped) -> Reading:
        whole = self.memory.get(text.key, lambda: take(book.model, text.given, stopped=stopped))
        if edit.empty:
            return whole

        def other() -> Reading:
            assert edit.source is not None
            layers = frozenset(head.layer for head in edit.patched)
            given = book.read_text(edit.source).given
            return take(book.model, given, keep=layers, stopped=stopped)

        def changed() -> Reading:
            changes = changes_of(edit, whole, other)
            return take(book.model, text.given, changes, stopped=stopped)

        return self.memory.get((text.key, edit), changed)

    def _likeliest(self, book: Book, text: Text, stopped: Stopped) -> int:
        reading = self._reading(book, text, Edit(), stopped)
        logits = reading.logits(torch.tensor([len(text) - 1], device=reading.hidden.device))
        assert logits is not None
        return int(logits[0].argmax())
