"""Clean and corrupted texts that align: pair by pair, as many tokens in one as in the other."""

from difflib import SequenceMatcher
from typing import Any

from manyheads.errors import InputError
from manyheads.models import build
from manyheads.models.model_interface import ModelInputs
from manyheads.tokenizers import token_text

REMEDY = "replace tokens one for one, so that positions match"
# Tokens of a text in a message; of a longer text those around the place where the pair parts.
MAX_TOKENS = 24


def check_aligned(model: build.Model, clean: ModelInputs, corrupted: ModelInputs) -> None:
    """Refuse the first pair whose texts have different numbers of tokens, and show both.

    Texts of different pairs may have different lengths.
    """
    if len(clean) != len(corrupted):
        raise InputError(
            f"there are {len(clean)} clean texts and {len(corrupted)} corrupted ones",
            "pass one corrupted text for each clean one",
        )
    pairs = unaligned_pairs(model, clean, corrupted)
    if pairs:
        raise InputError(_describe(model, clean, corrupted, pairs[0]), REMEDY)


def unaligned_pairs(model: build.Model, clean: ModelInputs, corrupted: ModelInputs) -> list[int]:
    """The numbers of the pairs whose texts have different numbers of tokens."""
    sizes = zip(_sizes(model, clean), _sizes(model, corrupted), strict=True)
    return [number for number, (first, second) in enumerate(sizes) if first != second]


def _sizes(model: build.Model, inputs: ModelInputs) -> list[tuple[int, ...]]:
    """The tokens of each text, and of its source where it has one."""
    if inputs.ids is None or inputs.examples:
        return [(size,) for size in inputs.sizes(model)]
    parts = [part.lengths.each for part in (inputs.ids, inputs.source) if part is not None]
    return list(zip(*parts, strict=True))


def _describe(model: build.Model, clean: ModelInputs, corrupted: ModelInputs, number: int) -> str:
    sizes = _sizes(model, clean)[number], _sizes(model, corrupted)[number]
    part = next(index for index, both in enumerate(zip(*sizes, strict=True)) if len({*both}) > 1)
    counts = f"the clean one has {sizes[0][part]} tokens and the corrupted one {sizes[1][part]}"
    parts = [(inputs.ids, inputs.source)[part] for inputs in (clean, corrupted)]
    names = "sources" if part else "texts"
    about = f"the {names} of pair {number}, counted from 0, do not align: {counts}"
    if parts[0] is None or parts[1] is None or clean.examples:
        return about
    first, second = (_tokens(model.tokenizer, ids.of(number).tolist()) for ids in parts if ids)
    start, end, begin, stop = _parting(first, second)
    return (
        f"{about}; they part at token {start}, {_joined(first[start:end])} against "
        f"{_joined(second[begin:stop])}. Clean: {_around(first, start)}. "
        f"Corrupted: {_around(second, begin)}"
    )


def _tokens(tokenizer: Any, ids: list[int]) -> list[str]:
    return [str(token) if tokenizer is None else token_text(tokenizer, token) for token in ids]


def _parting(first: list[str], second: list[str]) -> tuple[int, int, int, int]:
    """The first tokens that are not replaced one for one: a range of each text.

    >>> _parting(["a", "b", "c"], ["a", "x", "y", "c"]), _parting(["a"], ["a", "b"])
    ((1, 2, 1, 3), (1, 1, 1, 2))
    """
    for _, start, end, begin, stop in SequenceMatcher(None, first, second, False).get_opcodes():
        if end - start != stop - begin:
            return start, end, begin, stop
    return len(first), len(first), len(second), len(second)


def _around(tokens: list[str], place: int) -> str:
    start = max(0, min(place - MAX_TOKENS // 2, len(tokens) - MAX_TOKENS))
    chosen = _joined(tokens[start : start + MAX_TOKENS])
    return "… " * bool(start) + chosen + " …" * (start + MAX_TOKENS < len(tokens))


def _joined(tokens: list[str]) -> str:
    return " ".join(map(repr, tokens)) or "nothing"
