"""Masking: how many, which, what stands in their place, and whole words."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from manyheads.data.masking import (
    MaskedTokens,
    Masking,
    MaskingVocabulary,
    mask_tokens,
    masking_vocabulary,
)
from manyheads.errors import ConfigError
from manyheads.ragged import Ragged
from tests.messages import refuses

SIZE, MASK, SPECIALS = 60, 3, (0, 1, 2)
CORPUS = ["the unbelievable walking-stick was (truly) broken, wasn't it? 1984", "невероятно, да"]
WORDS = masking_vocabulary(None, SIZE, mask=MASK, specials=SPECIALS)


def texts(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list([torch.randint(SIZE, (each,), generator=generator) for each in lengths])


def masked(
    batch: Ragged, masking: Masking, seed: int = 0, words: MaskingVocabulary = WORDS
) -> MaskedTokens:
    return mask_tokens(batch, words, masking, torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_only_chosen_tokens_change_and_answers_are_what_they_were(
    lengths: list[int], seed: int
) -> None:
    batch = texts(*lengths, seed=seed)
    result = masked(batch, Masking(), seed)
    rest = torch.ones(len(batch.values), dtype=torch.bool)
    rest[result.positions] = False
    assert torch.equal(result.texts.values[rest], batch.values[rest])
    assert torch.equal(result.labels, batch.values[result.positions])
    assert result.texts.lengths.each == batch.lengths.each


def test_fractions_are_those_of_the_config() -> None:
    batch = texts(200_000)
    result = masked(batch, Masking())
    ordinary = WORDS.ordinary[batch.values].sum().item()
    assert len(result.positions) / ordinary == pytest.approx(0.3, abs=0.01)
    shown = result.texts.values[result.positions]
    hidden, kept = shown == MASK, shown == result.labels
    assert hidden.float().mean().item() == pytest.approx(0.8, abs=0.01)
    # One in 56 of those replaced by chance gets its own word back.
    assert kept.float().mean().item() == pytest.approx(0.1 + 0.1 / 56, abs=0.01)


def test_special_tokens_are_neither_chosen_nor_put_in() -> None:
    batch = texts(50_000)
    result = masked(
        batch, Masking(mask_fraction=1.0, mask_token_fraction=0.0, random_token_fraction=1.0)
    )
    special = torch.tensor([*SPECIALS, MASK])
    assert not torch.isin(result.labels, special).any()
    assert not torch.isin(result.texts.values[result.positions], special).any()
    assert len(result.positions) == WORDS.ordinary[batch.values].sum()


def test_the_generator_decides_everything() -> None:
    batch = texts(40, 3, 25)
    one, same, other = (masked(batch, Masking(), seed) for seed in (7, 7, 8))
    assert torch.equal(one.texts.values, same.texts.values)
    assert torch.equal(one.positions, same.positions)
    assert not torch.equal(one.positions, other.positions)
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    for generator, share in zip(draws, (0.1, 0.9), strict=True):
        mask_tokens(batch, WORDS, Masking(mask_fraction=share), generator)
    assert torch.equal(*(torch.rand(3, generator=generator) for generator in draws))


def trained(kind: str) -> Any:
    special = ["[CLS]", "[SEP]", "[MASK]"]
    if kind == "wordpiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[CLS]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=70, special_tokens=special)
    elif kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=270, special_tokens=special, initial_alphabet=alphabet
        )
    elif kind == "pieces":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
        )
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=special, unk_token="[CLS]")
    else:
        tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.BpeTrainer(
            vocab_size=70, special_tokens=special, end_of_word_suffix="</w>"
        )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def words_by_letters(encoded: Any, text: str) -> list[int]:
    """The word of each token, found in the text: letters and digits that touch."""
    numbers, word, end = [], -1, -1
    for start, stop in encoded.offsets:
        piece = text[start:stop]
        joins = start == end and not piece[:1].isspace()
        joins = joins and text[start].isalnum() and text[start - 1].isalnum()
        word += 0 if joins else 1
        numbers.append(word)
        end = stop
    return numbers


@pytest.mark.parametrize("kind", ["wordpiece", "bytes", "pieces", "suffix"])
def test_tokens_of_a_word_are_chosen_together(kind: str) -> None:
    tokenizer = trained(kind)
    text = CORPUS[0]
    encoded = tokenizer.encode(text, add_special_tokens=False)
    words = words_by_letters(encoded, text)
    assert len(set(words)) < len(words) / 1.5
    vocabulary = masking_vocabulary(tokenizer, 300)
    batch = Ragged.from_list([torch.tensor(encoded.ids)] * 2)
    split = 0
    for seed in range(40):
        for whole in (True, False):
            result = masked(batch, Masking(mask_fraction=0.4, whole_words=whole), seed, vocabulary)
            chosen = torch.zeros(2 * len(words), dtype=torch.bool)
            chosen[result.positions] = True
            both = list(
                zip([*words, *(100 + word for word in words)], chosen.tolist(), strict=True)
            )
            mix_seed = {word for word, _ in both if len({c for w, c in both if w == word}) > 1}
            if whole:
                assert not mix_seed, [encoded.tokens, words, mix_seed]
            split += len(mix_seed)
    assert split > 40


def test_the_tokenizer_names_the_mask_and_the_specials() -> None:
    tokenizer = trained("wordpiece")
    vocabulary = masking_vocabulary(tokenizer, 128)
    assert vocabulary.mask == tokenizer.token_to_id("[MASK]")
    size = tokenizer.get_vocab_size()
    assert vocabulary.ordinary.sum() == size - 3
    assert not vocabulary.ordinary[size:].any()
    vocabulary = masking_vocabulary(tokenizer, 128, mask=5, specials=(6,))
    assert vocabulary.mask == 5
    assert not vocabulary.ordinary[[5, 6]].any()
    assert vocabulary.ordinary[:5].all()


def test_what_cannot_be_is_refused() -> None:
    with refuses(
        ConfigError, "mask_fraction must be in (0, 1], got 0: use a fraction such as 0.3."
    ):
        Masking(mask_fraction=0.0)
    with refuses(ConfigError, "mask_token_fraction=0.8", "random_token_fraction=0.3", "use values"):
        Masking(random_token_fraction=0.3)
    with refuses(
        ConfigError,
        "whole_words needs a tokenizer: give the model its tokenizer.",
    ):
        masked(texts(5), Masking(whole_words=True))
    with refuses(ConfigError, "special token 60 is outside the vocabulary of 60: use 0 to 59."):
        masking_vocabulary(None, SIZE, mask=60, specials=())
    with refuses(ConfigError, "specials", "model.tokenizer"):
        masking_vocabulary(None, SIZE, mask=3)
    with refuses(ConfigError, "all 2 tokens are special: use fewer specials."):
        masking_vocabulary(None, 2, mask=0, specials=(1,))
    with refuses(
        ConfigError,
        "the tokenizer has 0 tokens named [MASK], <mask>, <|mask|>: "
        "set mask to a token id, or train the tokenizer with [MASK] as a special token.",
    ):
        masking_vocabulary(Tokenizer(models.BPE()), 10)
    with refuses(ConfigError, "token id 59", "10", "use a vocabulary of the model's size"):
        batch = Ragged.from_list([torch.tensor([59])])
        masked(batch, Masking(), 0, masking_vocabulary(None, 10, mask=0, specials=()))
