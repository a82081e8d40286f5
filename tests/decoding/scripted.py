"""Tokenizers made on the spot, and a model that says what it is told to."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from manyheads import build
from manyheads.decoding.request import GenerationRequest
from manyheads.ragged import Ragged

__all__ = ["END", "Scripted", "by_bytes", "by_words", "says"]

END = "<|end|>"


def by_bytes() -> Tokenizer:
    """A token a byte, so that letters break; token 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def by_words(*words: str) -> Tokenizer:
    """A token a word, its space in front as SentencePiece writes it."""
    vocabulary = {word: i for i, word in enumerate(("<unk>", *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return tokenizer


class Scripted:
    """Steps that always favor the next token of a text, one text a prompt."""

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.texts = list(texts)
        self.vocabulary = vocabulary
        self.step = 0

    def start(self, prompts: Ragged) -> Tensor:
        assert len(prompts) == len(self.texts)
        return self._scores()

    def next(self, ids: Tensor) -> Tensor:
        assert ids.tolist() == [text[self.step] for text in self.texts]
        self.step += 1
        return self._scores()

    def select(self, sequences: list[int]) -> None:
        self.texts = [self.texts[sequence] for sequence in sequences]

    def _scores(self) -> Tensor:
        ids = torch.tensor([text[self.step] for text in self.texts])
        return torch.nn.functional.one_hot(ids, self.vocabulary).float()


def says(monkeypatch: pytest.MonkeyPatch, *texts: str, end: bool = True) -> Any:
    """A model by bytes that says these texts, and then that it has ended."""
    tokenizer = by_bytes()
    model = build("gpt2", layers=1, width=8, heads=1, vocabulary=257, seed=0)
    model.tokenizer = tokenizer
    model.source_config = {"eos_token_id": 256} if end else {}
    # A space and more after the end, for whoever does not stop.
    scripts = [[*tokenizer.encode(text).ids, *([256] if end else []), *[0] * 99] for text in texts]
    monkeypatch.setattr(GenerationRequest, "steps", lambda _: Scripted(scripts, 257))
    return model
