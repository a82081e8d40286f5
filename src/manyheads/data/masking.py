"""Masked tokens for a model to guess: which, what stands in their place, what a word is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.ragged import Ragged

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """`share` of the tokens are to be guessed, of which most are hidden (arXiv 1810.04805).

    Of the chosen tokens the share `hidden` becomes the mask token and `replaced` another word at
    random; the rest stay as they are. With `whole="words"` the tokens of a word go together.
    """

    share: float = 0.3
    hidden: float = 0.8
    replaced: float = 0.1
    whole: Literal["tokens", "words"] = "tokens"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"share={self.share:g} of the tokens", "use 0 < share <= 1")
        if min(self.hidden, self.replaced) < 0 or self.hidden + self.replaced > 1:
            raise ConfigError(
                f"hidden={self.hidden:g} and replaced={self.replaced:g} are no shares of one whole",
                "use shares of 0 or more that sum to at most 1, such as 0.8 and 0.1",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """What masking must know of tokens: `ordinary` ones may be chosen and may replace others.

    A token belongs to the word before it if it says `follows` and its neighbour `goes_on`.
    """

    mask: int
    ordinary: Bool[Tensor, " v"]
    follows: Bool[Tensor, " v"] | None = None
    goes_on: Bool[Tensor, " v"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Masked:
    """A batch with hidden tokens; `places` are the chosen ones and `answers` what they were."""

    texts: Ragged
    places: Int[Tensor, " m"]
    answers: Int[Tensor, " m"]


def mask_tokens(
    texts: Ragged, vocabulary: Vocabulary, masking: Masking, draw: torch.Generator
) -> Masked:
    """Choose and hide tokens; the same state of `draw` gives the same on every device.

    >>> texts = Ragged.from_list([torch.tensor([0, 5, 6, 7])])
    >>> words = Vocabulary(9, torch.tensor([False] + [True] * 8 + [False]))
    >>> masked = mask_tokens(texts, words, Masking(share=1.0, hidden=1.0, replaced=0.0),
    ...                      torch.Generator().manual_seed(0))
    >>> masked.texts.values.tolist(), masked.answers.tolist()
    ([0, 9, 9, 9], [5, 6, 7])
    """
    ids = texts.values.cpu()
    if ids.numel() and int(ids.max()) >= vocabulary.ordinary.shape[0]:
        raise ConfigError(
            f"token id {int(ids.max())} is outside the {vocabulary.ordinary.shape[0]} "
            "that masking knows",
            "give a vocabulary of the model's size",
        )
    # Always as many numbers, so that what is drawn next depends on no earlier outcome.
    chance, fate = torch.rand(2, ids.shape[0], generator=draw, dtype=torch.float64)
    words = vocabulary.ordinary.nonzero().squeeze(1)
    others = words[torch.randint(len(words), ids.shape, generator=draw)]
    if masking.whole == "words":
        chance = chance[_first_of_word(ids, texts.lengths.positions.cpu(), vocabulary)]
    chosen = (chance < masking.share) & vocabulary.ordinary[ids]
    shown = torch.where(chosen & (fate < masking.hidden), vocabulary.mask, ids)
    swapped = chosen & (fate >= masking.hidden) & (fate < masking.hidden + masking.replaced)
    shown = torch.where(swapped, others, shown)
    places = chosen.nonzero().squeeze(1)
    device = texts.device
    return Masked(texts.with_values(shown.to(device)), places.to(device), ids[places].to(device))


def _first_of_word(
    ids: Int[Tensor, " n"], positions: Int[Tensor, " n"], vocabulary: Vocabulary
) -> Int[Tensor, " n"]:
    """For each token, where its word begins."""
    if vocabulary.follows is None or vocabulary.goes_on is None:
        raise ConfigError(
            'whole="words" asks which tokens make a word', "give the model its tokenizer"
        )
    joined = vocabulary.follows[ids] & (positions > 0)
    joined[1:] &= vocabulary.goes_on[ids[:-1]]
    places = torch.arange(ids.shape[0])
    return torch.where(joined, 0, places).cummax(0).values if ids.numel() else places


def vocabulary_of(
    tokenizer: Any,
    size: int,
    *,
    mask: int | Literal["tokenizer"] = "tokenizer",
    specials: tuple[int, ...] | Literal["tokenizer"] = "tokenizer",
) -> Vocabulary:
    """The vocabulary of `size` tokens as masking sees it, from a tokenizer or given numbers."""
    if tokenizer is None and (mask == "tokenizer" or specials == "tokenizer"):
        missing = "mask" if mask == "tokenizer" else "specials"
        raise ConfigError(
            f"masking is not told {missing} and the model has no tokenizer",
            f"give {missing}=, or set model.tokenizer",
        )
    return _vocabulary_of(tokenizer, size, mask, specials)


# Reading tens of thousands of words takes longer than masking a batch.
@lru_cache(maxsize=8)
def _vocabulary_of(
    tokenizer: Any,
    size: int,
    mask: int | Literal["tokenizer"],
    specials: tuple[int, ...] | Literal["tokenizer"],
) -> Vocabulary:
    names: dict[int, str] = {}
    if tokenizer is not None:
        names = {number: name for name, number in tokenizer.get_vocab().items() if number < size}
    if specials == "tokenizer":
        added = tokenizer.get_added_tokens_decoder()
        specials = tuple(number for number, token in added.items() if token.special)
    chosen = _mask_id(names) if mask == "tokenizer" else mask
    _check_ids((chosen, *specials), size)
    # A vocabulary is often rounded up, and what no tokenizer gives is nothing to be guessed.
    ordinary = torch.zeros(size, dtype=torch.bool)
    ordinary[list(names) if names else slice(None)] = True
    ordinary[[chosen, *specials]] = False
    if not ordinary.any():
        raise ConfigError(f"all {size} tokens are special", "name fewer specials")
    if not names:
        return Vocabulary(chosen, ordinary)
    follows, goes_on = _joints(tokenizer, names, size)
    return Vocabulary(chosen, ordinary, follows & ordinary, goes_on & ordinary)


def _mask_id(names: dict[int, str]) -> int:
    found = [number for number, name in names.items() if name in MASK_NAMES]
    if len(found) != 1:
        raise ConfigError(
            f"the tokenizer has {len(found)} tokens named {', '.join(MASK_NAMES)}",
            "give mask, the id of the one that is, or learn the tokenizer with [MASK] as a special",
        )
    return found[0]


def _check_ids(ids: Sequence[int], size: int) -> None:
    for number in ids:
        if not 0 <= number < size:
            raise ConfigError(
                f"special token {number} is outside vocabulary={size}", f"use 0 to {size - 1}"
            )


def _joints(
    tokenizer: Any, names: dict[int, str], size: int
) -> tuple[Bool[Tensor, " v"], Bool[Tensor, " v"]]:
    """Which tokens may follow within a word, and which may be followed."""
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    bytewise = _mentions(described, "ByteLevel")
    follows, goes_on = torch.zeros(2, size, dtype=torch.bool)
    for number, name in names.items():
        if prefix:
            follows[number], goes_on[number] = name.startswith(prefix), True
        elif suffix:
            follows[number], goes_on[number] = True, not name.endswith(suffix)
        else:
            read = _read_bytes(name) if bytewise else name
            follows[number] = bool(read) and _in_word(read[0])
            goes_on[number] = bool(read) and _in_word(read[-1])
    return follows, goes_on


def _mentions(described: Any, kind: str) -> bool:
    """Whether some part of a tokenizer's description is of this type."""
    if isinstance(described, dict):
        if described.get("type") == kind:
            return True
        parts = [part for name, part in described.items() if name not in ("model", "added_tokens")]
        return any(_mentions(part, kind) for part in parts)
    return isinstance(described, list) and any(_mentions(part, kind) for part in described)


@lru_cache(maxsize=1)
def _bytes_by_letter() -> dict[str, int]:
    """Byte-level tokenizers write bytes that cannot be printed as letters from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(rest)
    }


def _read_bytes(name: str) -> str:
    """One letter a byte; those of longer characters read as letters, which they most often are."""
    letters = _bytes_by_letter()
    if any(letter not in letters for letter in name):
        return name
    return "".join(chr(byte) if byte < 128 else "x" for byte in map(letters.__getitem__, name))


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"
