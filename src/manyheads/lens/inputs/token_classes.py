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


def _consists_of(text: str, *categories: str) -> bool:
    """Whether a text has letters besides spaces, all of some categories of Unicode."""
    letters = text.strip()
    return bool(letters) and all(
        unicodedata.category(letter).startswith(categories) for letter in letters
    )


# Whether a token belongs to a class, by its text; the tokenizer says which are "special".
BY_TEXT: dict[str, Callable[[str], bool]] = {
    "punctuation": lambda text: _consists_of(text, "P"),
    "digits": lambda text: _consists_of(text, "N"),
    "newline": lambda text: not text.strip() and "\n" in text,
    "brackets": lambda text: _consists_of(text, "Ps", "Pe"),
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
    plain = [(token, text) for token, text in enumerate(texts) if token not in special]
    members = {
        name: [token for token, text in plain if BY_TEXT[name](text)]
        if name in BY_TEXT
        else special
        for name in classes
    }
    return {name: _column(name, ids, vocabulary) for name, ids in members.items()}


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
