"""The heads that read a needle are known in a model set by hand; where nothing is copied, none."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.task_heads.retrieval import (
    RetrievalHeads,
    find_retrieval_heads,
    retrieval_needles,
)
from manyheads.models.build import build
from manyheads.models.recipes import gpt2
from manyheads.taps import Head
from tests.lens.head_kinds.test_text_tests import reader
from tests.messages import refuses
from tests.models.zoo import ENCODERS, small

# As long as the planted model reads.
WORDS = (8, 16)


@pytest.fixture(scope="module")
def planted() -> Any:
    return reader()


@pytest.fixture(scope="module")
def result(planted: Any) -> RetrievalHeads:
    needles = retrieval_needles(planted, 6, words=WORDS)
    return find_retrieval_heads(planted, needles, progress=False)


def test_planted_heads_retrieve(result: RetrievalHeads) -> None:
    # The second looks where the first looks.
    assert set(result.heads) == {Head(1, 0), Head(1, 1)}
    assert result.copied > 0.8
    assert all(result["retrieval"].of(head) > 0.8 for head in result.heads)
    assert result.metadata["threshold"] >= 0.1


def test_without_them_needles_of_the_other_half_are_lost(result: RetrievalHeads) -> None:
    effects = result.held_out
    assert effects["needles"].low > 0.6
    assert effects["needles, without these heads"].high < 0.1
    assert effects["needles"].samples == 6
    for name in ("needles", "loss on articles"):
        for heads in ("these heads", "the induction heads among them", "as many random heads"):
            assert f"{name}, without {heads}" in effects
        # Both are induction heads.
        assert f"{name}, without the others among them" not in effects


def test_planted_heads_are_induction_heads_too(result: RetrievalHeads, tmp_path: Path) -> None:
    overlap = result.overlap
    assert (overlap.heads, overlap.induction, overlap.both) == (2, 2, 2)
    assert overlap.by_chance == pytest.approx(2 * 2 / 8)
    assert overlap.depth == overlap.induction_depth == 1.0
    assert overlap.rank_correlation > 0.5
    result.save(tmp_path / "heads.safetensors")
    again = lens.load(tmp_path / "heads.safetensors")
    assert str(again) == str(result)


def test_where_nothing_is_copied_no_head_retrieves() -> None:
    model = reader()
    with torch.no_grad():
        model.readout.weight.copy_(model.readout.weight.roll(5, dims=0))
    needles = retrieval_needles(model, 4, words=WORDS)
    result = find_retrieval_heads(model, needles, progress=False)
    assert result.heads == ()
    assert result.held_out == {}
    assert result.problem in str(result)


def test_a_random_model_has_no_such_head(planted: Any) -> None:
    size = planted.tokenizer.get_vocab_size()
    model = build(gpt2(width=32, heads=4, layers=2, vocabulary=size, positions=160), seed=0)
    model.tokenizer = planted.tokenizer
    needles = retrieval_needles(model, 4, words=WORDS)
    result = find_retrieval_heads(model, needles, progress=False)
    assert result.heads == ()
    assert "copies" in result.problem


def test_needles_are_hidden_in_so_many_words(planted: Any) -> None:
    short, long = (
        [len(needle.ids) for needle in retrieval_needles(planted, 4, words=(words, words))]
        for words in (8, 24)
    )
    assert min(long) > max(short)
    with refuses(InputError, "0 of 4 needles fit", "fewer words"):
        retrieval_needles(planted, 4, words=(150, 150))
    with refuses(InputError, "(9, 8) words"):
        retrieval_needles(planted, 4, words=(9, 8))


def test_models_that_cannot_copy_are_refused(planted: Any) -> None:
    with refuses(InputError, "does not continue a text"):
        find_retrieval_heads(small(ENCODERS["bert"]))
    with refuses(InputError, "2 needles or more, got 1"):
        find_retrieval_heads(planted, retrieval_needles(planted, 1, words=WORDS))
