"""Patterns come twice where they should, and gradients are those of the distance they name."""

from itertools import islice

import pytest
import torch

from manyheads.parts import Causal, Window
from studies.recurrence.patterns import (
    CUE,
    LETTERS,
    PatternTexts,
    gradient_by_distance,
    recalled,
)
from studies.recurrence.study import MODELS, STUDY, at_best_rates, make_model
from studies.small_models import count_parameters, language_model
from studies.study import Result


def texts() -> PatternTexts:
    return PatternTexts("topics", "cpu", 20_000)


def test_the_mask_has_the_letters_that_the_first_copy_predicts() -> None:
    for ids, mask in islice(texts().pattern_batches(6, 40, seed=0), 3):
        assert mask.shape == (6, 40)
        assert not mask[3:].any()
        for text, row in zip(ids[:3].tolist(), mask[:3], strict=True):
            targets = row.nonzero().flatten() + 1
            assert len(targets) == LETTERS - CUE
            second = int(targets[0]) - CUE
            pattern = text[second : second + LETTERS]
            copies = [at for at in range(second) if text[at : at + LETTERS] == pattern]
            assert copies
            assert copies[0] + LETTERS <= second


@pytest.mark.parametrize("distance", [12, 25])
def test_a_pattern_ends_a_text_at_its_distance(distance: int) -> None:
    for text in texts().patterns_at(distance, 3, 50).tolist():
        assert text[-LETTERS:] == text[-LETTERS - distance : len(text) - distance]


def test_a_model_that_copies_recalls_everything() -> None:
    ids = texts().patterns_at(20, 3, 50)

    class Copier(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.one_hot(ids.roll(19, dims=1), 256).flatten(0, 1).float()

    assert recalled(Copier(), ids) == 1.0
    assert recalled(Copier(), texts().patterns_at(21, 3, 50)) < 1.0


def test_gradients_end_where_a_window_does() -> None:
    window = {"mask": Causal() & Window(before=2)}
    model = language_model(width=16, layers=1, heads=2, attention=window)
    ids = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    norms = gradient_by_distance(model, ids, batch=2)
    assert norms.shape == (8,)
    assert (norms > 0).tolist() == [True, True, True, *[False] * 5]


def test_both_models_have_the_same_weights() -> None:
    settings = {**STUDY.settings("full"), "layers": 1}
    counts = [count_parameters(make_model(name, settings, 0)) for name in MODELS]
    assert counts[1] == pytest.approx(counts[0], rel=0.005)


def test_each_kind_is_judged_at_its_best_rate() -> None:
    arms = {
        "attention at 0.001": {"0": {"bits": 2.0}},
        "attention at 0.002": {"0": {"bits": 1.9}},
        "LSTM at 0.004": {"0": {"bits": 2.1}},
        "LSTM at 0.008": {"0": {"bits": float("nan")}},
    }
    best = at_best_rates(Result("recurrence", "full", {}, "none", arms=arms))
    assert best.mean("attention", "bits") == 1.9
    assert best.mean("LSTM", "bits") == 2.1
