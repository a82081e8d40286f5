"""Texts to vectors: pooling, order, cutting, refusals."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads import Ragged, build, encode
from manyheads.encoding.encode import TEXTS_AT_ONCE, Options, encode_with_counts
from manyheads.encoding.text_reader import _COPIES
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.parts import linear_layout
from tests.encoding.tiny import as_ids, letters, plain_hidden, small
from tests.messages import refuses

TEXTS = ["the cat sat", "", "a", "on the mat", "the cat sat on the mat again", "b"]


def by_hand(hidden: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    return {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ["bert-base", "gpt2"])
def test_a_vector_is_its_texts_own_tokens_pooled(name: str, pooling: Pooling) -> None:
    model = small(name)
    result = encode(model, TEXTS, pooling=pooling)
    expected = [by_hand(plain_hidden(model, as_ids(text)), pooling) for text in TEXTS]
    torch.testing.assert_close(result, torch.stack(expected), atol=1e-6, rtol=1e-5)


def test_an_encoder_decoder_gives_what_its_encoder_reads() -> None:
    model = small("transformer-base", hidden=64)
    with torch.no_grad():
        read = model.encode(Ragged.from_list([torch.tensor(as_ids("the cat"))])).values
    torch.testing.assert_close(encode(model, "the cat")[0], read.mean(0), atol=1e-6, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    texts=st.lists(st.text(alphabet="abc ", max_size=20), max_size=12),
    batch_tokens=st.integers(1, 60),
)
def test_any_batch_size_gives_the_same_vectors_in_order(
    texts: list[str], batch_tokens: int
) -> None:
    model = small()
    result = encode(model, texts, batch_tokens=batch_tokens)
    assert result.shape == (len(texts), 32)
    for text, vector in zip(texts, result, strict=True):
        alone = encode(model, text)[0]
        torch.testing.assert_close(vector, alone, atol=1e-6, rtol=1e-5)


def test_texts_read_in_several_parts_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    expected = encode(model, TEXTS)
    monkeypatch.setitem(TEXTS_AT_ONCE, "cpu", 2)
    torch.testing.assert_close(encode(model, TEXTS), expected, atol=1e-6, rtol=1e-5)


def test_one_string_is_a_list_of_one_and_an_empty_list_has_no_rows() -> None:
    model = small()
    assert encode(model, "the cat").shape == (1, 32)
    assert encode(model, []).shape == (0, 32)


def test_texts_may_be_token_ids() -> None:
    model = small()
    expected = encode(model, TEXTS)
    ids = [as_ids(text) for text in TEXTS]
    for given_ids in (ids, [np.array(each) for each in ids], [torch.tensor(each) for each in ids]):
        torch.testing.assert_close(encode(model, given_ids), expected)
    ragged = Ragged.from_list([torch.tensor(each) for each in ids])
    torch.testing.assert_close(encode(model, ragged), expected)


def test_a_text_without_any_token_gives_zeros() -> None:
    model = small("gpt2")
    model.tokenizer = letters(special=False)
    result = encode(model, ["", "a", ""], pooling="last", normalize=True)
    assert result.norm(dim=1).tolist() == pytest.approx([0, 1, 0])


def test_the_folder_sets_the_pooling_and_the_caller_may_override_it() -> None:
    model = small()
    model.sentence = SentenceConfig(pooling="cls", normalize=True)
    expected = encode(model, TEXTS, pooling="cls", normalize=False)
    torch.testing.assert_close(encode(model, TEXTS), F.normalize(expected, dim=1))
    means = encode(model, TEXTS, pooling="mean", normalize=False)
    model.sentence = None
    torch.testing.assert_close(encode(model, TEXTS), means)


def test_long_texts_are_cut_with_their_special_tokens_kept_and_counted() -> None:
    model = small()
    with pytest.warns(TruncationWarning, match=r"^2 of 3 texts were truncated to 6 tokens$"):
        result = encode(model, ["abcdefgh", "abcd", "abcde"], max_length=6)
    expected = encode(model, [as_ids("abcd")] * 3)
    torch.testing.assert_close(result, expected)


def test_texts_are_truncated_to_the_positions_or_to_the_limit_of_the_folder() -> None:
    model = small(positions=16)
    assert encode_with_counts(model, ["a" * 40], Options()).max_length == 16
    model.sentence = SentenceConfig(max_length=9)
    done = encode_with_counts(model, ["a" * 40, "a" * 7], Options())
    assert (done.max_length, done.truncated, done.tokens) == (9, 1, 18)
    assert encode_with_counts(model, ["a" * 40], Options(max_length=12)).max_length == 12


def test_what_the_tokenizers_file_asks_for_is_neither_followed_nor_lost() -> None:
    model = small()
    before = model.tokenizer.to_str()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        long, short = encode(model, ["abcdefghij", "a"])
    torch.testing.assert_close(long, plain_hidden(model, as_ids("abcdefghij")).mean(0))
    torch.testing.assert_close(short, plain_hidden(model, as_ids("a")).mean(0))
    assert model.tokenizer.to_str() == before


def test_another_tokenizer_or_limit_is_not_served_by_the_copy_of_the_first() -> None:
    model = small()
    encode(model, "abc")
    (copy,) = _COPIES[model][1].values()
    encode(model, "abd")
    assert list(_COPIES[model][1].values()) == [copy]
    model.tokenizer = letters(special=False)
    torch.testing.assert_close(
        encode(model, "abc")[0], plain_hidden(model, as_ids("abc", special=False)).mean(0)
    )


def test_every_part_of_the_model_stays_in_its_mode_and_nothing_is_dropped() -> None:
    model = small(dropout=0.5)
    expected = encode(model, TEXTS)
    model.train()
    model.embedding.eval()
    modes = [module.training for module in model.modules()]
    torch.testing.assert_close(encode(model, TEXTS), expected)
    assert [module.training for module in model.modules()] == modes


def test_vectors_are_plain_tensors_of_float32_that_may_be_trained_on() -> None:
    result = encode(small(dtype=torch.bfloat16), TEXTS)
    assert result.dtype == torch.float32
    assert not result.requires_grad
    assert not result.is_inference()


def test_weights_are_put_back_where_encoding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layout.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(linear_layout, "MIN_TOKENS", 1)
    model = small()
    monkeypatch.setattr(type(model.stack), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encode(model, "abc")
    assert model.stack.layers[0].attention.project.weight.is_contiguous()


def test_models_that_read_no_texts_are_refused() -> None:
    vision = build("vit-b16", layers=1, width=32, heads=4, seed=0)
    with refuses(InputError, "a Vision does not read texts: give it images"):
        encode(vision, ["a"])


def test_texts_need_a_tokenizer_and_ids_do_not() -> None:
    model = small()
    model.tokenizer = None
    message = (
        "this model has no tokenizer: load it from a folder with tokenizer.json, "
        "set model.tokenizer, or give token ids."
    )
    with refuses(InputError, message):
        encode(model, ["a"])
    assert encode(model, [[5]]).shape == (1, 32)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", 3], "text 1 is an int, and others are strings: give only strings"),
        ([[5], [41]], "text 1 has token id 41, outside vocabulary=40: use ids of 0 to 39."),
        ([[5], [-1]], "text 1 has token id -1, outside vocabulary=40: use ids of 0 to 39."),
        ([[0.5]], "text 0 is neither a string nor a list of token ids"),
        ([None], "text 0 is neither a string nor a list of token ids"),
        (
            [[5] * 513],
            "text 0 has 513 token ids, and the model reads 512: truncate it",
        ),
        (
            ["a", "b\ud800"],
            "text 1 has a lone surrogate at character 1: decode it again",
        ),
        (
            Ragged.from_list([torch.zeros(2)]),
            "the Ragged holds no token ids: give one integer per token.",
        ),
    ],
)
def test_what_is_no_text_is_refused_by_its_place(texts: Any, message: str) -> None:
    with refuses(InputError, message):
        encode(small(), texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
        ({"max_length": 0}, "max_length must be at least 1, got 0"),
        ({"max_length": 2}, "special tokens, got 2: use 3 or more."),
        ({"max_length": 513}, "max_length=513 exceeds the model's 512 positions: use at most 512."),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with refuses(InputError, message):
        encode(small(), ["a"], **options)  # type: ignore[arg-type]


def test_an_unknown_pooling_is_refused() -> None:
    with refuses(InputError, "mean", "cls", "last", "got 'max'"):
        encode(small(), ["a"], pooling="max")  # type: ignore[arg-type]
