"""Negatives per text, and batches that are encoded part by part."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.taps import Site, Tap
from manyheads.train.objectives import Contrastive
from manyheads.train.regularizers import HeadDiversity, Regularized
from tests.models.zoo import DECODERS, ENCODERS, ids

NOBODY = torch.Generator()
PAIRS = Batch(texts=ids((5, 2, 7, 1)), others=ids((3, 3, 1, 9), seed=1))
TRIPLES = replace(PAIRS, negatives=ids((4, 2, 6), seed=2), negative_counts=(2, 0, 1, 0))


@pytest.fixture
def model() -> Any:
    return build(ENCODERS["modernbert"], seed=0)


def gradients(objective: Any, model: Any, batch: Batch = TRIPLES) -> tuple[float, dict[str, Any]]:
    model.zero_grad()
    loss = objective.loss(model, batch, NOBODY)
    loss.combined.backward()
    return loss.combined.item(), {
        name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
    }


def test_negatives_of_all_texts_are_candidates_of_each(model: Any) -> None:
    def vectors(texts: Ragged) -> torch.Tensor:
        each = [model(Ragged.from_list([text])).hidden.values.mean(0) for text in texts.to_list()]
        return torch.nn.functional.normalize(torch.stack(each), dim=-1)

    assert TRIPLES.texts is not None
    assert TRIPLES.others is not None
    assert TRIPLES.negatives is not None
    candidates = Ragged.concatenate([TRIPLES.others, TRIPLES.negatives])
    scores = vectors(TRIPLES.texts) @ vectors(candidates).T / 0.05
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(4), reduction="sum")
    loss = Contrastive().loss(model, TRIPLES, NOBODY)
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)


def test_a_candidate_that_is_also_right_is_no_negative(model: Any) -> None:
    def loss(texts: list[int], others: list[int], negatives: list[int]) -> float:
        counts = (len(negatives), *[0] * (len(texts) - 1))
        batch = Batch(
            texts=each.select(texts),
            others=each.select(others),
            negatives=each.select(negatives),
            negative_counts=counts,
        )
        return Contrastive().loss(model, batch, NOBODY).total.item()

    each = ids((5, 2, 7, 4, 6, 3))
    alone = loss([0], [1], [3])
    assert loss([0], [1], [1, 3]) == pytest.approx(alone, rel=1e-5)
    # The same pair twice, and the same text with another right answer.
    assert loss([0, 0], [1, 1], [3]) == pytest.approx(2 * alone, rel=1e-5)
    assert loss([0, 0], [1, 2], [3]) == pytest.approx(alone + loss([0], [2], [3]), rel=1e-5)


@pytest.mark.parametrize("objective", [Contrastive(), Contrastive(both_ways=True, pooling="cls")])
def test_parts_change_neither_the_loss_nor_its_gradients(model: Any, objective: Any) -> None:
    whole, expected = gradients(objective, model)
    for tokens in (1, 8, 20):
        loss, result = gradients(replace(objective, cache_tokens=tokens), model)
        assert loss == pytest.approx(whole, rel=1e-5)
        assert result.keys() == expected.keys()
        for name, each in result.items():
            worst = (each - expected[name]).abs().max() / expected[name].abs().max()
            assert worst < 1e-5, name


class Widest:
    """Remembers how many tokens a layer computes at most with gradients."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def wants(self, site: Site) -> bool:
        return site.tap is Tap.AFTER and site.layer == 0

    def see(self, site: Site, value: Any) -> None:
        del site
        self.tokens.append(value.values.shape[0])


def test_a_watcher_sees_every_part_and_dropout_is_the_same_in_both_passes() -> None:
    model = build(ENCODERS["bert"], seed=0)
    watcher = Widest()
    objective = Contrastive(cache_tokens=8)
    torch.manual_seed(0)
    model.train()
    loss = objective.loss(model, TRIPLES, NOBODY, watch=watcher)
    forward = len(watcher.tokens)
    assert max(watcher.tokens) <= 9
    assert forward > 4
    loss.combined.backward()
    assert len(watcher.tokens) > forward
    assert all(each.grad.isfinite().all() for each in model.parameters() if each.grad is not None)


def test_parts_work_with_regularizers_and_mixed_precision(model: Any) -> None:
    regularized = Regularized(
        objective=Contrastive(cache_tokens=8), regularizers=(HeadDiversity(weight=0.1),)
    )
    with torch.autocast("cpu", torch.bfloat16):
        loss = regularized.loss(model, TRIPLES, NOBODY)
        whole = Contrastive().loss(model, TRIPLES, NOBODY)
    assert loss.parts.keys() == {"head outputs"}
    assert loss.total.item() == pytest.approx(whole.total.item(), rel=0.02)
    loss.combined.backward()
    assert model.embedding.tokens.weight.grad.abs().sum() > 0


def test_losses_of_routers_are_averaged_over_parts() -> None:
    model = build(DECODERS["experts"], seed=0)
    whole, parts = (
        Contrastive(cache_tokens=tokens).loss(model, TRIPLES, NOBODY) for tokens in (0, 20)
    )
    assert whole.parts.keys() == parts.parts.keys() != set()
    assert parts.parts["router z"].item() == pytest.approx(whole.parts["router z"].item(), rel=1e-4)


def test_what_has_nothing_to_compare_is_refused(model: Any) -> None:
    one = Batch(texts=ids((3,)), others=ids((2,), seed=1))
    with pytest.raises(InputError, match="two pairs or more, or negatives"):
        Contrastive().loss(model, one, NOBODY)
    with_negative = replace(one, negatives=ids((4,), seed=2), negative_counts=(1,))
    assert Contrastive().loss(model, with_negative, NOBODY).targets == 1
    # The short last batch of an epoch adds nothing.
    assert Contrastive().prepare(model, one, NOBODY).targets == 0
    with pytest.raises(InputError, match="3 negatives"):
        Contrastive().loss(model, replace(TRIPLES, negative_counts=(1, 1, 0, 0)), NOBODY)
    with pytest.raises(ConfigError, match="cache_tokens must be at least 0, got -1"):
        Contrastive(cache_tokens=-1)
