"""Heads set by hand that retrieve, repeat or ignore what they read, and heads that do not."""

from typing import Any

import pytest
import torch

from manyheads.lens.head_kinds import scores_by_text, text_tests
from manyheads.lens.head_kinds.criteria import KindScores, threshold_table
from manyheads.lens.head_kinds.head_tests import HeadTests
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs import synthetic
from manyheads.lens.inputs.synthetic import FALLBACK_WORDS
from manyheads.parts.masks import Causal
from tests.lens.inputs.test_word_texts import word_tokenizer
from tests.lens.planted import SHARP, Look, Stream, model_of_looks, offset_look
from tests.models.zoo import MODELS, small

PLACES = 160


def reader() -> Any:
    """Two heads that look at what came next, one of which says it; and heads that do not read."""
    tokenizer = word_tokenizer("The", "secret", "words", "of", "are", *synthetic.NEEDLE_NAMES)
    size = tokenizer.get_vocab_size()
    same = SHARP * torch.eye(size)
    tastes = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    first = torch.zeros(PLACES, PLACES)
    first[:, 0] = SHARP
    before = Look(places=offset_look(-1, PLACES).places, to="before")
    layers = [
        [before, Look(places=first), Look(), Look(words=3 * tastes)],
        [
            Look(words=same, words_before=True, writes=3 * torch.eye(size), to="word"),
            Look(words=same, words_before=True),
            offset_look(-3, PLACES),
            Look(words=same, places=-SHARP * torch.eye(PLACES), writes=torch.eye(size), to="word"),
        ],
    ]
    model = model_of_looks(Stream(size, PLACES), layers, Causal())
    model.tokenizer = tokenizer
    return model


def score(model: Any, seed: int = 0) -> dict[str, KindScores]:
    """By kind, of the tests that score texts."""
    tests = HeadTests(model, threshold_table(), progress=False)
    text_tests.measure_retrieval(tests, model, FALLBACK_WORDS, seed)
    text_tests.measure_repetition(tests, model, seed)
    text_tests.measure_context(tests, model, seed)
    assert tests.complete
    return {kind.name: kind for kind in tests.scores}


@pytest.fixture(scope="module")
def scores() -> dict[str, KindScores]:
    return score(reader())


def heads(kind: KindScores) -> set[str]:
    return {f"L{index // 4}H{index % 4}" for index in range(8) if not kind.refusal(index)}


def test_a_head_that_attends_to_what_is_copied_retrieves(scores: dict[str, KindScores]) -> None:
    # The second of the two looks at the needle too: what a head attends to is measured.
    assert heads(scores["retrieval"]) == {"L1H0", "L1H1"}
    label = scores["retrieval"].score(4)
    assert label.score > 0.9
    assert (label.draws, label.unit) == ((5, 5), "texts")
    # The published tenth, or more where a text has few different words.
    assert 0.1 <= label.threshold < 0.2
    assert f"the model copies {label.score:.0%}" in label.evidence


def test_nothing_is_retrieved_where_the_model_copies_nothing() -> None:
    model = reader()
    with torch.no_grad():
        model.readout.weight.copy_(model.readout.weight.roll(5, dims=0))
    scores = score(model)
    assert not heads(scores["retrieval"])
    assert not heads(scores["repetition"])


def test_a_head_that_writes_what_came_next_repeats(scores: dict[str, KindScores]) -> None:
    # The second looks where the first looks, but writes something else.
    assert heads(scores["repetition"]) == {"L1H0"}
    assert scores["repetition"].scores[7] < 0.1


def test_heads_whose_pattern_is_the_same_on_all_texts_are_blind(
    scores: dict[str, KindScores],
) -> None:
    assert heads(scores["context-blind"]) == {"L0H0", "L0H1", "L0H2", "L1H2"}
    label = scores["context-blind"].score(0)
    assert (label.unit, label.samples, label.draws) == ("pairs", 5, (5, 5))


def test_labels_hold_on_new_texts(scores: dict[str, KindScores]) -> None:
    for kind, again in score(reader(), seed=7).items():
        assert heads(again) == heads(scores[kind])


def test_overlap_is_that_of_the_patterns() -> None:
    model = reader()
    texts = synthetic.unrelated_pairs(model, 2)
    assert {len(text) for text in texts} == {64}
    scores, complete = scores_by_text.measure_sameness(model, texts, [1, 1], progress=False)
    assert complete
    assert scores.values[:, 0].tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    # Tastes for words share no more than chance.
    assert (scores.values[:, 3] < 0.5).all()


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("encoder bert", {"retrieval": "tokenizer", "repetition": "next token"}),
        ("encoder classes", {"repetition": "next token"}),
        ("seq2seq t5", {"repetition": "continue a text"}),
    ],
)
def test_a_model_that_cannot_be_tested_has_a_reason(name: str, reasons: dict[str, str]) -> None:
    missing = kinds(small(MODELS[name]), sequences=2, progress=False).missing
    for kind, reason in reasons.items():
        assert reason in missing[kind]
