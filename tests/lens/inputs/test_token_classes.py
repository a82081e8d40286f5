"""Classes of tokens, told from tokenizers of both kinds."""

from typing import Any

import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.inputs.token_classes import CLASSES, token_classes
from manyheads.lens.measure.statistics import statistics
from manyheads.models.build import build
from tests.messages import refuses
from tests.models.zoo import DECODERS

TEXTS = ["Hello, world! (1 + 22) [x]\n\nIt's 1984; a list:\n- one\n- two", "¿Qué? «Да» — 3½"]


def byte_level() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[CLS]", "(", ")", ",", "##,", "##s", "7", "##7", "a", "…"]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]"])
    return tokenizer


def members(tokenizer: Any, name: str) -> set[str]:
    size = tokenizer.get_vocab_size()
    column = token_classes(tokenizer, size, (name,))[name]
    return {tokenizer.id_to_token(token) for token in column.nonzero().flatten().tolist()}


def test_classes_of_byte_level_pieces() -> None:
    tokenizer = byte_level()
    assert members(tokenizer, "special") == {"<|end|>"}
    assert {",", "!", "(", ")", "-", ";"} <= members(tokenizer, "punctuation")
    assert (
        {"(", ")", "[", "]"} <= members(tokenizer, "brackets") <= members(tokenizer, "punctuation")
    )
    assert set("0123456789") <= members(tokenizer, "digits")
    assert "Ċ" in members(tokenizer, "newline")
    for name in CLASSES:
        assert "a" not in members(tokenizer, name)
        assert "Ġ" not in members(tokenizer, name)


def test_classes_of_pieces_that_go_on_a_word() -> None:
    tokenizer = word_piece()
    assert members(tokenizer, "punctuation") == {"(", ")", ",", "##,", "…"}
    assert members(tokenizer, "brackets") == {"(", ")"}
    assert members(tokenizer, "digits") == {"7", "##7"}
    assert members(tokenizer, "special") == {"[PAD]", "[UNK]", "[CLS]"}
    assert members(tokenizer, "newline") == set()


def test_ids_of_ones_own_and_a_vocabulary_larger_than_the_tokenizer() -> None:
    assert token_classes(None, 6, {"mine": [1, 4]})["mine"].tolist() == [0, 1, 0, 0, 1, 0]
    larger = token_classes(word_piece(), 50, ("digits",))["digits"]
    assert larger.shape == (50,)
    assert larger.sum() == 2
    assert token_classes(None, 6, None) == {}


def test_statistics_of_strings_tell_all_classes() -> None:
    model = build(DECODERS["sinusoidal"], seed=0)
    tokenizer = byte_level()
    model.tokenizer = tokenizer
    grown = torch.nn.Embedding(320, 32)
    model.embedding.tokens = grown
    object.__setattr__(model.config.embedding, "vocabulary", 320)
    try:
        result = statistics(model, TEXTS, progress=False)
    finally:
        object.__setattr__(model.config.embedding, "vocabulary", 29)
    assert {f"on_{name}" for name in CLASSES} <= set(result.names)
    ids = [token for text in TEXTS for token in tokenizer.encode(text).ids]
    marked = token_classes(tokenizer, 320, ("punctuation",))["punctuation"][ids]
    assert result.class_fractions["punctuation"] == pytest.approx(float(marked.mean()))


def test_refusals() -> None:
    with refuses(
        InputError,
        "'verbs'",
        "use punctuation, digits, newline, brackets, special",
        "{'verbs': [7, 8]}",
    ):
        token_classes(word_piece(), 12, ("verbs",))
    with refuses(InputError, "'mine' has token id 12", "vocabulary=12", "0 to 11"):
        token_classes(None, 12, {"mine": [12]})
