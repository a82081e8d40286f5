"""Cross-attention heads that follow the order of the text, against the returned weights."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import wrap
from manyheads.errors import InputError
from manyheads.lens import inspect
from manyheads.lens.head_kinds.alignment import measure_alignment
from manyheads.lens.head_kinds.criteria import threshold_table
from manyheads.lens.head_kinds.head_tests import HeadTests
from manyheads.lens.head_kinds.kinds import Kinds, kinds
from manyheads.lens.inputs.texts import read_inputs
from manyheads.taps import Sublayer
from tests.bridge.zoo import texts_of, tiny

TARGETS = ([1, 7, 8, 7, 8, 9, 4, 5, 6], [1, 20, 21, 20, 3, 4])


@pytest.fixture(scope="module")
def examples() -> list[dict[str, torch.Tensor]]:
    sounds = [example["input_features"] for example in texts_of("whisper")]
    pairs = zip(sounds, TARGETS, strict=True)
    return [
        {"input_features": sound, "decoder_input_ids": torch.tensor([ids])} for sound, ids in pairs
    ]


@pytest.fixture(scope="module")
def result(examples: list[Any]) -> Kinds:
    return kinds(wrap(tiny("whisper")), examples, progress=False)


def in_order(peaks: list[int]) -> float:
    pairs = list(combinations(peaks, 2))
    return sum(1.0 if later > first else 0.5 * (later == first) for first, later in pairs) / len(
        pairs
    )


def test_scores_are_those_of_the_weights_that_transformers_returns(
    examples: list[Any], result: Kinds
) -> None:
    peer = tiny("whisper")
    before = peer.config._attn_implementation
    peer.set_attn_implementation("eager")
    with torch.no_grad():
        weights = [peer(**text, output_attentions=True).cross_attentions for text in examples]
    peer.set_attn_implementation(before)
    scores = result.scores["alignment"]
    for address, score in scores.items():
        if address.sublayer is not Sublayer.CROSS:
            assert np.isnan(score)
            continue
        head = [text[address.head.layer][0, address.head.head, 1:] for text in weights]
        expected = [in_order(rows.argmax(-1).tolist()) for rows in head]
        assert score == pytest.approx(np.mean(expected), abs=1e-6)
        spread = np.std(expected, ddof=1)
        assert scores.error_of(address) == pytest.approx(spread / 2**0.5, abs=1e-6)


def test_heads_above_the_threshold_are_labeled_and_others_are_not(
    examples: list[Any], result: Kinds
) -> None:
    ranked = [score for _, score in result.scores["alignment"].ranked() if not np.isnan(score)]
    between = (ranked[0] + ranked[1]) / 2
    model = wrap(tiny("whisper"))
    own = kinds(model, examples, thresholds={"alignment": between}, progress=False)
    assert len(own.heads("alignment")) == 1
    assert "over 2 texts" in own.of(own.heads("alignment")[0])[0].evidence
    assert own.missing["induction"] == "the inputs are not texts alone"
    with pytest.raises(InputError, match="omit syntax"):
        kinds(model, examples, syntax="treebank.conllu")


def test_pairs_of_texts_are_tested_too_and_short_ones_have_no_order() -> None:
    model = wrap(tiny("bart"))
    for texts, measured in ((texts_of("bart"), True), ([([5, 6, 7], [1, 2])], False)):
        tests = HeadTests(model, threshold_table(), progress=False)
        measure_alignment(tests, read_inputs(model, texts))
        assert [kind.kind for kind in tests.scores] == ["alignment"] * measured
        assert ("alignment" in tests.missing) != measured


def test_an_inspection_of_speech_has_kinds(examples: list[Any]) -> None:
    inspection = inspect(wrap(tiny("whisper")), examples, progress=False)
    assert inspection.kinds is not None
    assert "alignment" in inspection.kinds.scores
