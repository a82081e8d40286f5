"""Pairs: each text must find its own among the others."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.models.provenance import SentenceConfig
from manyheads.ragged import Ragged
from manyheads.train.objectives import Contrastive
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, ids

NOBODY = torch.Generator()
PAIRS = Batch(texts=ids((5, 2, 7, 1)), others=ids((3, 3, 1, 9), seed=1))


@pytest.fixture
def model() -> Any:
    return build(ENCODERS["modernbert"], seed=0)


def vectors(model: Any, texts: Ragged, pooling: str) -> torch.Tensor:
    each = [model(Ragged.from_list([text])).hidden.values for text in texts.to_list()]
    pick = {"mean": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}
    return F.normalize(torch.stack([pick[pooling](one) for one in each]), dim=-1)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("both_ways", [True, False])
def test_the_loss_is_that_of_texts_read_one_by_one(
    model: Any, pooling: Any, both_ways: bool
) -> None:
    objective = Contrastive(temperature=0.1, pooling=pooling, both_ways=both_ways)
    loss = objective.loss(model, PAIRS, NOBODY)
    cosines = vectors(model, PAIRS.texts, pooling) @ vectors(model, PAIRS.others, pooling).T / 0.1
    own = cosines.diagonal()
    expected = (cosines.logsumexp(1) - own).sum()
    if both_ways:
        expected = (expected + (cosines.logsumexp(0) - own).sum()) / 2
    assert loss.targets == 4
    torch.testing.assert_close(loss.total, expected, rtol=1e-4, atol=1e-4)


def test_pooling_is_that_of_the_models_folder(model: Any) -> None:
    mean, first = (
        Contrastive(pooling=pooling).loss(model, PAIRS, NOBODY).total for pooling in ("mean", "cls")
    )
    assert torch.equal(Contrastive().loss(model, PAIRS, NOBODY).total, mean)
    model.sentence = SentenceConfig(pooling="cls")
    assert torch.equal(Contrastive().loss(model, PAIRS, NOBODY).total, first)


def test_a_decoder_learns_from_its_last_tokens() -> None:
    model = build(DECODERS["llama"], seed=0)
    loss = Contrastive(pooling="last").loss(model, PAIRS, NOBODY)
    loss.combined.backward()
    assert model.embedding.tokens.weight.grad.abs().sum() > 0


def test_what_does_not_fit_is_refused(model: Any) -> None:
    with refuses(InputError, "Contrastive needs pairs of texts: give as many others as texts."):
        Contrastive().loss(model, Batch(texts=ids((3, 2)), others=ids((3,))), NOBODY)
    with refuses(ConfigError, "temperature must be above 0, got 0.0: use a value such as 0.05."):
        Contrastive(temperature=0.0)
    with refuses(
        ConfigError,
        "Contrastive cannot train a Seq2Seq: use a text encoder or decoder.",
    ):
        Contrastive().check(build(SEQ2SEQS["2017"]))
