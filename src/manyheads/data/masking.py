"""Masking of tokens for masked language modeling."""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.ragged import Ragged
from manyheads.tokenizers import BYTE_LEVEL

MASK_NAMES = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """The fraction of tokens to predict, and how they are corrupted (arXiv 1810.04805).

    Of the chosen tokens, `mask_token_fraction` become the mask token, `random_token_fraction` a
    random token, and the rest is unchanged. `whole_words` chooses the tokens of a word together.
    """

    mask_fraction: float = 0.3
    mask_token_fraction: float = 0.8
    random_token_fraction: float = 0.1
    whole_words: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.mask_fraction <= 1:
            raise ConfigError(
                f"mask_fraction must be in (0, 1], got {self.mask_fraction:g}",
                "use a fraction such as 0.3",
            )
        mask, random = self.mask_token_fraction, self.random_token_fraction
        if min(mask, random) < 0 or mask + random > 1:
            raise ConfigError(
                f"mask_token_fraction={mask:g} and random_token_fraction={random:g} must be "
                "fractions with a sum of at most 1",
                "use values such as 0.8 and 0.1",
            )


@dataclass(frozen=True, slots=True, eq=False)
class MaskingVocabulary:
    """Properties of tokens: `ordinary` ones may be masked and may replace others.

    A token belongs to the same word as the one before it if it `continues_word` and the one before
    `is_continued`.
    """

    mask: int
    ordinary: Bool[Tensor, " v"]
    continues_word: Bool[Tensor, " v"] | None = None
    is_continued: Bool[Tensor, " v"] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MaskedTokens:
    """Masked texts; `positions` are the chosen tokens and `labels` their ids before masking."""

    texts: Ragged
    positions: Int[Tensor, " m"]
    labels: Int[Tensor, " m"]


def mask_tokens(
    texts: Ragged, vocabulary: MaskingVocabulary, masking: Masking, generator: torch.Generator
) -> MaskedTokens:
    """Mask tokens; the result depends only on `generator`, not on the device.

    >>> texts = Ragged.from_list([torch.tensor([0, 5, 6, 7])])
    >>> words = MaskingVocabulary(9, torch.tensor([False] + [True] * 8 + [False]))
    >>> masked = mask_tokens(texts, words, Masking(mask_fraction=1.0, mask_token_fraction=1.0,
    ...                      random_token_fraction=0.0), torch.Generator().manual_seed(0))
    >>> masked.texts.values.tolist(), masked.labels.tolist()
    ([0, 9, 9, 9], [5, 6, 7])
    """
    ids = texts.values.cpu()
    if ids.numel() and int(ids.max()) >= vocabulary.ordinary.shape[0]:
        raise ConfigError(
            f"token id {int(ids.max())} is outside the vocabulary "
            f"of {vocabulary.ordinary.shape[0]}",
            "use a vocabulary of the model's size",
        )
    # The number of random draws does not depend on their outcome.
    chance, fate = torch.rand(2, ids.shape[0], generator=generator, dtype=torch.float64)
    words = vocabulary.ordinary.nonzero().squeeze(1)
    others = words[torch.randint(len(words), ids.shape, generator=generator)]
    if masking.whole_words:
        if vocabulary.continues_word is None or vocabulary.is_continued is None:
            raise ConfigError("whole_words needs a tokenizer", "give the model its tokenizer")
        joined = vocabulary.continues_word[ids] & (texts.lengths.positions.cpu() > 0)
        joined[1:] &= vocabulary.is_continued[ids[:-1]]
        # All tokens of a word have the chance of its first.
        chance = chance[torch.where(joined, 0, torch.arange(ids.shape[0])).cummax(0).values]
    chosen = (chance < masking.mask_fraction) & vocabulary.ordinary[ids]
    mask = masking.mask_token_fraction
    values = torch.where(chosen & (fate < mask), vocabulary.mask, ids)
    random = chosen & (fate >= mask) & (fate < mask + masking.random_token_fraction)
    values = torch.where(random, others, values)
    positions = chosen.nonzero().squeeze(1)
    device = texts.device
    return MaskedTokens(
        texts.with_values(values.to(device)), positions.to(device), ids[positions].to(device)
    )


# Reading tens of thousands of words takes longer than masking a batch.
@lru_cache(maxsize=8)
def masking_vocabulary(
    tokenizer: Any,
    size: int,
    *,
    mask: int | Literal["tokenizer"] = "tokenizer",
    specials: tuple[int, ...] | Literal["tokenizer"] = "tokenizer",
) -> MaskingVocabulary:
    """The vocabulary of `size` tokens as masking sees it, from a tokenizer or from ids."""
    if tokenizer is None and (mask == "tokenizer" or specials == "tokenizer"):
        missing = "mask" if mask == "tokenizer" else "specials"
        raise ConfigError(
            f"{missing} comes from the tokenizer, and the model has none",
            f"set {missing}, or model.tokenizer",
        )
    names: dict[int, str] = {}
    if tokenizer is not None:
        names = {number: name for name, number in tokenizer.get_vocab().items() if number < size}
    if specials == "tokenizer":
        added = tokenizer.get_added_tokens_decoder()
        specials = tuple(number for number, token in added.items() if token.special)
    if mask == "tokenizer":
        ids = [number for number, name in names.items() if name in MASK_NAMES]
        if len(ids) != 1:
            raise ConfigError(
                f"the tokenizer has {len(ids)} tokens named {', '.join(MASK_NAMES)}",
                "set mask to a token id, or train the tokenizer with [MASK] as a special token",
            )
        mask = ids[0]
    for number in (mask, *specials):
        if not 0 <= number < size:
            problem = f"special token {number} is outside the vocabulary of {size}"
            raise ConfigError(problem, f"use 0 to {size - 1}")
    # A vocabulary is often padded, and ids without a token must not be used.
    ordinary = torch.zeros(size, dtype=torch.bool)
    ordinary[list(names) if names else slice(None)] = True
    ordinary[[mask, *specials]] = False
    if not ordinary.any():
        raise ConfigError(f"all {size} tokens are special", "use fewer specials")
    if not names:
        return MaskingVocabulary(mask, ordinary)
    continues_word, is_continued = _word_joints(tokenizer, names, size)
    return MaskingVocabulary(mask, ordinary, continues_word & ordinary, is_continued & ordinary)


def _word_joints(
    tokenizer: Any, names: dict[int, str], size: int
) -> tuple[Bool[Tensor, " v"], Bool[Tensor, " v"]]:
    """Which tokens may continue a word, and which may be continued."""
    described = json.loads(tokenizer.to_str())
    model = described["model"]
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    bytewise = _mentions(described, "ByteLevel")
    continues_word, is_continued = torch.zeros(2, size, dtype=torch.bool)
    for number, name in names.items():
        if prefix:
            continues_word[number], is_continued[number] = name.startswith(prefix), True
        elif suffix:
            continues_word[number], is_continued[number] = True, not name.endswith(suffix)
        else:
            read = _read_bytes(name) if bytewise else name
            continues_word[number] = bool(read) and _in_word(read[0])
            is_continued[number] = bool(read) and _in_word(read[-1])
    return continues_word, is_continued


def _mentions(described: Any, kind: str) -> bool:
    """Whether a part of a tokenizer's JSON is of this type."""
    if isinstance(described, dict):
        if described.get("type") == kind:
            return True
        parts = [part for name, part in described.items() if name not in ("model", "added_tokens")]
        return any(_mentions(part, kind) for part in parts)
    return isinstance(described, list) and any(_mentions(part, kind) for part in described)


def _read_bytes(name: str) -> str:
    """One character per byte; bytes of multi-byte characters count as letters."""
    if any(letter not in BYTE_LEVEL for letter in name):
        return name
    return "".join(chr(byte) if byte < 128 else "x" for byte in map(BYTE_LEVEL.__getitem__, name))


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"
