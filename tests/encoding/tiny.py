"""Small models that read texts, each letter a token, for tests that need no real weights."""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from manyheads import Encoder, Ragged, build

LETTERS = "abcdefghijklmnopqrstuvwxyz "
FIRST, LAST, UNKNOWN = 0, 1, 2


def letters(*, special: bool = True) -> Any:
    """A tokenizer whose own file asks for padding and a limit, as many do."""
    names = {"[CLS]": FIRST, "[SEP]": LAST, "[UNK]": UNKNOWN}
    words = names | {letter: 3 + place for place, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    if special:
        tokenizer.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", FIRST), ("[SEP]", LAST)]
        )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=7)
    return tokenizer


def small(name: str = "bert-base", **changes: Any) -> Any:
    """A model that reads letters."""
    model = build(name, layers=2, width=32, heads=4, vocabulary=40, seed=0, **changes)
    model.tokenizer = letters()
    return model


@torch.no_grad()
def plain_hidden(model: Encoder, ids: list[int]) -> torch.Tensor:
    """What the model makes of one text alone."""
    hidden = model(Ragged.from_list([torch.tensor(ids)])).hidden
    assert isinstance(hidden, Ragged)
    return hidden.values


def as_ids(text: str, *, special: bool = True) -> list[int]:
    """The ids by hand."""
    body = [3 + LETTERS.index(letter) for letter in text]
    return [FIRST, *body, LAST] if special else body
