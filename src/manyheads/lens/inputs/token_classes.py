"""Classes of tokens, such as punctuation and digits, by their text in the tokenizer."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError

# The token ids of each class, or the names of known classes.
TokenClasses = Mapping[str, Iterable[int]] | Sequence[str] | None


def _categories(text: str) -> set[str]:
    return {unicodedata.category(letter) for letter in text.strip()}


def _punctuation(text: str) -> bool:
    return bool(text.strip()) and all(category.startswith("P") for category in _categories(text))


def _digits(text: str) -> bool:
    return bool(text.strip()) and all(category.startswith("N") for category in _categories(text))


def _newline(text: str) -> bool:
    return not text.strip() and "\n" in text


def _brackets(text: str) -> bool:
    return bool(text.strip()) and _categories(text) <= {"Ps", "Pe"}


# Whether a token belongs to a class, by its text; the tokenizer says which are "special".
BY_TEXT: dict[str, Callable[[str], bool]] = {
    "punctuation": _punctuation,
    "digits": _digits,
    "newline": _newline,
    "brackets": _brackets,
}
CLASSES = (*BY_TEXT, "special")


def token_classes(
    tokenizer: Any, vocabulary: int, classes: TokenClasses
) -> dict[str, Float[Tensor, " v"]]:
    """For each class, ones and zeros over the vocabulary.

    `None` means all known classes, or none if there is no tokenizer.
    """
    if isinstance(classes, Mapping):
        return {name: _column(name, ids, vocabulary) for name, ids in classes.items()}
    if classes is None:
        classes = CLASSES if tokenizer is not None else ()
    for name in classes:
        if name not in CLASSES:
            raise InputError(
                f"there is no token class {name!r}",
                f"use {', '.join(CLASSES)}, or pass ids, as in {{{name!r}: [7, 8]}}",
            )
    if classes and tokenizer is None:
        raise InputError(
            "token classes need a tokenizer",
            "set model.tokenizer, or pass ids, as in {'mine': [7, 8]}",
        )
    added = tokenizer.get_added_tokens_decoder() if classes else {}
    special = {token for token, kind in added.items() if kind.special}
    texts = _texts(tokenizer, vocabulary) if set(classes) & set(BY_TEXT) else []
    columns = {}
    for name in classes:
        members: Iterable[int] = special
        if name in BY_TEXT:
            belongs = BY_TEXT[name]
            plain = (token for token in range(len(texts)) if token not in special)
            members = [token for token in plain if belongs(texts[token])]
        columns[name] = _column(name, members, vocabulary)
    return columns


def _column(name: str, ids: Iterable[int], vocabulary: int) -> Float[Tensor, " v"]:
    members = list(ids)
    for token in members:
        if not 0 <= token < vocabulary:
            raise InputError(
                f"class {name!r} has token id {token}, outside vocabulary={vocabulary}",
                f"use ids from 0 to {vocabulary - 1}",
            )
    column = torch.zeros(vocabulary)
    column[torch.tensor(members, dtype=torch.long)] = 1.0
    return column


def _texts(tokenizer: Any, vocabulary: int) -> list[str]:
    size = min(vocabulary, tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    # WordPiece marks the continuation of a word by ##, which is not punctuation.
    return [text.removeprefix("##") for text in texts]
