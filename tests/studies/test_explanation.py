"""Classifiers with replaceable weights, and the tests of these weights."""

import pytest
import torch

from studies.explanation.classifiers import (
    KINDS,
    Kind,
    WordClassifier,
    outputs_of,
    uniform,
)
from studies.explanation.weight_tests import (
    MAX_DIVERGENCE,
    agree,
    divergence,
    find_adversaries,
    left_out,
    permute,
)

IDS = torch.tensor([[2, 3, 4, 5, 6], [7, 8, 3, 0, 0]])
all_kinds = pytest.mark.parametrize("kind", KINDS)


def make(kind: Kind) -> WordClassifier:
    torch.manual_seed(0)
    model = WordClassifier(kind, 9, width=8, heads=2, length=6, dropout=0.5).eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    return model


@all_kinds
def test_weights_are_over_words_alone_and_padding_changes_nothing(kind: Kind) -> None:
    model = make(kind)
    answers, weights = outputs_of(model, IDS)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    assert (weights[1, :, 3:] == 0).all()
    longer = torch.cat((IDS, torch.zeros(2, 1, dtype=torch.long)), dim=1)
    torch.testing.assert_close(outputs_of(model, longer)[0], answers)
    torch.testing.assert_close(outputs_of(model, IDS, batch=1)[0], answers)


@all_kinds
def test_own_weights_put_back_give_the_same_answer_and_others_do_not(kind: Kind) -> None:
    model = make(kind)
    answers, weights = outputs_of(model, IDS)
    torch.testing.assert_close(outputs_of(model, IDS, weights)[0], answers)
    last = torch.nn.functional.one_hot(torch.tensor([[4], [2]]), 5).float()
    assert not torch.allclose(outputs_of(model, IDS, last)[0], answers, atol=1e-3)


def test_the_order_of_words_matters_only_with_context() -> None:
    turned = torch.tensor([[3, 8, 7, 0, 0]])
    for kind in KINDS:
        model = make(kind)
        same = torch.allclose(outputs_of(model, turned)[0], outputs_of(model, IDS[1:])[0])
        assert same == (kind == "words")


def test_uniform_weights_are_equal_over_words() -> None:
    torch.testing.assert_close(uniform(IDS)[1, 0], torch.tensor([1, 1, 1, 0, 0]) / 3)


def test_divergence_is_zero_for_equal_weights_and_largest_for_disjoint_ones() -> None:
    one, other = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[0.0, 1.0]]])
    assert float(divergence(one, one)) == 0
    assert float(divergence(one, other)) == pytest.approx(MAX_DIVERGENCE)


def test_a_model_that_reads_nothing_has_any_weights() -> None:
    model = make("words")
    with torch.no_grad():
        model.classes.weight.zero_()
    assert (left_out(model, IDS, outputs_of(model, IDS)[0]) == 0).all()
    # Then all weights give the same answer.
    assert permute(model, IDS, draws=3, seed=0) == 0
    settings = {"search_steps": 60}
    assert find_adversaries(model, IDS, settings, 0)["divergence"] > MAX_DIVERGENCE / 2


@all_kinds
def test_rankings_are_compared_by_text(kind: Kind) -> None:
    values = agree(make(kind), IDS)
    assert set(values) == {"gradient", "left out", "each other"}
    assert all(-1 <= value <= 1 for value in values.values())


def test_an_adversary_keeps_the_answer() -> None:
    model = make("LSTM")
    values = find_adversaries(model, IDS, {"search_steps": 30}, 0)
    assert 0 <= values["divergence"] <= MAX_DIVERGENCE
