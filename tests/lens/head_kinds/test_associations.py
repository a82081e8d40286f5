"""Weights that connect words are found, and copies are not taken for them."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from manyheads.lens.head_kinds import associations
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.taps import Head
from tests.lens.planted import Look, text_model


def tokenizer(*relations: str) -> Any:
    pairs = associations.word_pairs()
    words = [word for name in relations for pair in pairs[name].items() for word in pair]
    vocabulary = dict.fromkeys(["[UNK]", "un", "known", *words])
    split = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(vocabulary)}, "[UNK]")
    )
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return split


def test_a_head_that_maps_words_recalls_and_one_that_copies_does_not() -> None:
    split = tokenizer("capitals", "partners")
    size, pairs = split.get_vocab_size(), associations.token_pairs(split)
    mapping = torch.zeros(size, size)
    first, second = torch.tensor(pairs["capitals"]).T
    # What is written for a word stands in its column.
    mapping[second, first] = 1.0
    looks = [
        Look(writes=mapping, to="word"),
        Look(writes=torch.eye(size), to="word"),
        # A copy that knows a little of the relation.
        Look(writes=torch.eye(size) + 0.5 * mapping, to="word"),
        Look(writes=torch.zeros(size, size)),
        Look(writes=torch.randn(size, size, generator=torch.Generator().manual_seed(0)), to="word"),
    ]
    model = text_model(looks, tokenizer=split, places=160)
    result = kinds(model, sequences=2, progress=False)
    assert [str(head) for head in result.heads("recall")] == ["L0H0"]
    (label,) = [label for label in result.of(Head(0, 0)) if label.kind == "recall"]
    assert (label.name, label.score, label.samples) == ("recall capitals", 1.0, len(first))
    assert result.scores["recall partners"].of(Head(0, 0)) == 0.0


def test_relations_of_few_single_tokens_are_left_out() -> None:
    assert set(associations.token_pairs(tokenizer("past"))) == {"past"}


@pytest.mark.parametrize("relation", associations.word_pairs())
def test_no_word_of_a_relation_answers_twice(relation: str) -> None:
    pairs = associations.word_pairs()[relation]
    assert len(set(pairs.values())) == len(pairs) >= associations.MIN_PAIRS
    assert not set(pairs) & set(pairs.values())
