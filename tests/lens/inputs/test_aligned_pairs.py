"""Pairs of texts with as many tokens in one as in the other, and what is said where they differ."""

from typing import Any

import pytest

from manyheads.errors import InputError
from manyheads.lens.causal.patching import patch
from manyheads.lens.inputs.aligned_pairs import check_aligned, unaligned_pairs
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from tests.messages import refuses
from tests.models.zoo import SEQ2SEQS, small
from tests.studio import models


@pytest.fixture(scope="module")
def model() -> Any:
    return models.decoder(layers=1)


def inputs(model: Any, *texts: Any) -> Any:
    return read_inputs(model, list(texts))


def test_pairs_of_different_lengths_align(model: Any) -> None:
    clean = inputs(model, "The cat sat", "The dog sat on the mat")
    corrupted = inputs(model, "The dog sat", "The cat sat on the log")
    check_aligned(model, clean, corrupted)
    assert unaligned_pairs(model, clean, corrupted) == []


def test_a_pair_that_does_not_align_is_named_with_its_tokens_and_place(model: Any) -> None:
    clean = inputs(model, "The cat sat", "The cat sat on the mat")
    corrupted = inputs(model, "The dog sat", "The dog sat on and in the mat")
    assert unaligned_pairs(model, clean, corrupted) == [1]
    with refuses(
        InputError, "pair 1", "6 tokens", "8", "they part at token", "replace tokens"
    ) as e:
        check_aligned(model, clean, corrupted)
    assert "'The' ' cat' ' sat' ' on' ' the' ' mat'" in str(e.value)
    assert "nothing against ' and' ' in'" in str(e.value)


def test_of_a_long_text_the_tokens_around_the_place_are_printed(model: Any) -> None:
    words = " sat on the mat" * 30
    with pytest.raises(InputError) as error:
        check_aligned(model, inputs(model, "The" + words), inputs(model, "The cat cat" + words))
    assert len(str(error.value)) < 700
    assert "…" in str(error.value)


def test_token_ids_and_counts_of_texts_are_checked_too() -> None:
    bare = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    with refuses(InputError, "pair 0", "'2' against '7' '8'"):
        patch(bare, [[1, 2, 3]], [[1, 7, 8, 3]], progress=False)
    with refuses(InputError, "2 clean texts and 1 corrupted"):
        patch(bare, [[1, 2], [3]], [[1, 2]], progress=False)


def test_the_sources_of_an_encoder_decoder_align_too() -> None:
    pairs: Any = small(SEQ2SEQS["window"])
    clean, corrupted = inputs(pairs, ([1, 2], [3])), inputs(pairs, ([1], [3, 4]))
    with refuses(InputError, "pair 0", "1 tokens", "2"):
        check_aligned(pairs, clean, corrupted)
    with refuses(InputError, "sources of pair 0"):
        check_aligned(pairs, clean, inputs(pairs, ([1], [3])))
