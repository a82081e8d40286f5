"""What a model is given to read: texts, pairs of texts or images, and what it should answer."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from manyheads.encoding.text_reader import TextReader, Texts, find_longest, open_texts, reads_texts
from manyheads.errors import CutWarning, InputError
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.padding import Output
from manyheads.models.readout import ClassHead, LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher

# For each text the right answer by position; or, for classes of whole texts and images, one each.
Targets = Sequence[Mapping[int, int]] | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Given:
    """What a model reads: `ids`, with `source` beside them for a `Seq2Seq`, or `images`."""

    ids: Ragged | None = None
    source: Ragged | None = None
    images: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.images) if self.ids is None else len(self.ids)

    def sizes(self, model: Model) -> list[int]:
        """Tokens of each text or image, by which work is shared out."""
        if self.ids is not None:
            before = [0] * len(self) if self.source is None else self.source.lengths.each
            return [one + other for one, other in zip(self.ids.lengths.each, before, strict=True)]
        assert isinstance(model, Vision), "only images come without ids"
        side = model.config.patches.size
        return [1 + (each.shape[1] // side) * (each.shape[2] // side) for each in self.images]

    def lengths(self, model: Model) -> Lengths:
        """Of the sequences that are answered for."""
        if self.ids is not None:
            return self.ids.lengths
        return Lengths.of(self.sizes(model), self.images[0].device)

    def select(self, texts: Sequence[int]) -> "Given":
        return Given(
            ids=None if self.ids is None else self.ids.select(texts),
            source=None if self.source is None else self.source.select(texts),
            images=tuple(self.images[text] for text in texts) if self.images else (),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """Right `answers` at `places` of the packed batch, each with the number of its text.

    Where whole texts have classes, a place is a text.
    """

    places: Int[Tensor, " m"]
    answers: Int[Tensor, " m"]
    owners: Int[Tensor, " m"]


def read(model: Model, texts: Any) -> Given:
    """Strings, lists of ids or a Ragged; pairs of them for a `Seq2Seq`; images for a `Vision`."""
    device = next(model.parameters()).device
    if isinstance(texts, Given):
        return texts
    if isinstance(model, Vision):
        if not all(isinstance(image, Tensor) for image in texts):
            raise InputError("a Vision reads no texts", "give images, (channels, y, x) each")
        images = tuple(image.to(device) for image in texts)
        if not images:
            raise InputError("there is no image", "give at least one")
        return Given(images=images)
    reader = reads_texts(model)
    if not isinstance(reader, Seq2Seq):
        return Given(ids=_ids(reader, texts).to(device))
    sources, targets = _pairs(texts)
    return Given(
        source=_ids(reader, sources).to(device), ids=_ids(reader, targets, starts=True).to(device)
    )


def run(model: Model, given: Given, watch: Watcher | None = None) -> Output:
    """The model's answer to whatever it reads."""
    if isinstance(model, Vision):
        return model(list(given.images), watch=watch)
    assert given.ids is not None, "every model but a Vision reads ids"
    if isinstance(model, Seq2Seq):
        return model(given.source, given.ids, watch=watch)
    return model(given.ids, watch=watch)


def climb(model: Model, given: Given, watch: Watcher) -> None:
    """The same for a watcher alone: no word is scored."""
    if isinstance(model, Vision):
        run(model, given, watch)
        return
    assert given.ids is not None, "every model but a Vision reads ids"
    if isinstance(model, Seq2Seq):
        model.hidden(given.source, given.ids, watch=watch)
    else:
        model.hidden(given.ids, watch=watch)


def ask(model: Model, given: Given, targets: Targets | None) -> Asked:
    """Where answers are due; a model that writes needs none to be given: each next token is one."""
    readout = model.config.readout
    if isinstance(readout, ClassHead):
        return _ask_classes(given, targets)
    if targets is None:
        return _ask_next(model, given)
    if isinstance(model, Vision) or model.readout is None:
        raise InputError(
            f"this {type(model).__name__} scores no tokens", "use a model with a language head"
        )
    return _ask_given(given, targets)


def check_asked(given: Given, targets: Targets | None) -> None:
    """Refuse texts of which none is asked anything; some of them may be."""
    if targets is None and given.ids is not None and given.ids.lengths.longest < 2:
        raise InputError("no text has a second token to be asked for", "give longer texts")
    if targets is not None and not any(isinstance(each, int) or each for each in targets):
        raise InputError("no text is asked anything", "give {position: right id} for some")


def shares(sizes: Sequence[int], batch_tokens: int) -> Iterator[range]:
    """Runs of neighbouring texts with at most `batch_tokens` tokens together, at least one text.

    >>> list(shares([3, 4, 9, 1, 1], batch_tokens=8))
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    start, held = 0, 0
    for place, size in enumerate(sizes):
        if place > start and held + size > batch_tokens:
            yield range(start, place)
            start, held = place, 0
        held += size
    if start < len(sizes):
        yield range(start, len(sizes))


def _ids(model: TextReader, texts: Texts, *, starts: bool = False) -> Ragged:
    reader = open_texts(model, texts, find_longest(model, None))
    if not len(reader):
        raise InputError("there is no text", "give at least one")
    found, cut = reader.read(range(len(reader)))
    if cut:
        warnings.warn(
            f"{cut} of {len(reader)} texts were longer than {reader.longest} tokens, and were cut",
            CutWarning,
            stacklevel=2,
        )
    rows = [torch.from_numpy(row) for row in found]
    if starts and reader.tokenizer is not None:
        first = torch.tensor([_start(model)])
        rows = [torch.cat((first, row)) for row in rows]
    for place, row in enumerate(rows):
        if not len(row):
            raise InputError(f"text {place} is empty", "leave it out")
    return Ragged.from_list(rows)


def _start(model: TextReader) -> int:
    """The token that a `Seq2Seq` begins to write after."""
    for said in (model.generation, model.described or {}):
        start = said.get("decoder_start_token_id")
        if isinstance(start, int):
            return start
    raise InputError(
        "this model does not say which token it begins to write after",
        "give token ids, the first of each target being that token",
    )


def _pairs(texts: Any) -> tuple[Any, Any]:
    if isinstance(texts, tuple) and len(texts) == 2 and isinstance(texts[0], Ragged):
        return texts
    for place, pair in enumerate(texts):
        if isinstance(pair, str) or len(pair) != 2 or isinstance(pair[0], int):
            raise InputError(
                f"text {place} is no pair", "give (source, target) for each, as the model writes"
            )
    sources, targets = zip(*texts, strict=True)
    return sources, targets


def _ask_next(model: Model, given: Given) -> Asked:
    if not isinstance(model, Decoder | Seq2Seq) or not isinstance(
        model.config.readout, LanguageHead
    ):
        raise InputError(
            f"this {type(model).__name__} writes no next token",
            "give targets, for each text the right id by position",
        )
    assert given.ids is not None
    lengths = given.ids.lengths
    ends = lengths.offsets[1:].long() - 1
    kept = torch.ones(lengths.total, dtype=torch.bool, device=given.ids.device)
    kept[ends] = False
    places = kept.nonzero().squeeze(1)
    return Asked(places, given.ids.values[places + 1], lengths.sequence_of_token[places])


def _ask_given(given: Given, targets: Targets) -> Asked:
    assert given.ids is not None
    _check_count(given, targets)
    found: list[tuple[int, int, int]] = []
    lengths = given.ids.lengths
    for text, right in enumerate(targets):
        if not isinstance(right, Mapping):
            raise InputError(f"targets of text {text} are {right!r}", "give {position: right id}")
        for position, answer in right.items():
            if not 0 <= position < lengths.each[text]:
                raise InputError(
                    f"text {text} has no position {position}", f"use 0 to {lengths.each[text] - 1}"
                )
            found.append((lengths.starts[text] + position, answer, text))
    numbers = torch.tensor(found, dtype=torch.long, device=given.ids.device)
    return Asked(*numbers.reshape(-1, 3).unbind(1))


def _ask_classes(given: Given, targets: Targets | None) -> Asked:
    if targets is None:
        raise InputError("the right classes are not known", "give targets, one class a text")
    _check_count(given, targets)
    device = given.images[0].device if given.ids is None else given.ids.device
    places = torch.arange(len(given), device=device)
    wrong = next((each for each in islice(targets, len(given)) if isinstance(each, Mapping)), None)
    if wrong is not None:
        raise InputError(f"target {wrong!r} is no class", "give one class a text")
    return Asked(places, torch.tensor(targets, device=device), places)


def _check_count(given: Given, targets: Targets) -> None:
    if len(targets) != len(given):
        raise InputError(
            f"there are {len(targets)} targets for {len(given)} texts", "give one each"
        )
