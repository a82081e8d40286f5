"""MaxSim with gradients, in blocks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from manyheads.data.batch import Batch
from manyheads.encoding.late_scores import maxsim_with_gradients
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.ragged import Lengths, Ragged
from manyheads.train.objectives import Contrastive
from tests.models.zoo import ENCODERS, ids


def vectors(*lengths: int, seed: int) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(lengths), 8, generator=generator).requires_grad_()
    return Ragged(values, Lengths.of(lengths))


def one_by_one(queries: Ragged, documents: Ragged) -> torch.Tensor:
    rows = [
        torch.stack(
            [(q @ d.T).amax(1).sum() if len(d) else q.new_zeros(()) for d in documents.to_list()]
        )
        for q in queries.to_list()
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("block", [1, 60, 2**26])
def test_scores_and_gradients_are_those_of_one_pair_after_another(block: int) -> None:
    queries, documents = vectors(3, 1, 4, seed=0), vectors(5, 0, 2, 7, 1, seed=1)
    weight = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    result, expected = (
        maxsim_with_gradients(queries, documents, products=block),
        one_by_one(queries, documents),
    )
    torch.testing.assert_close(result, expected)
    inputs = (queries.values, documents.values)
    for ours, peer in zip(
        torch.autograd.grad((result * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours, peer)


def test_vectors_of_two_models_are_refused() -> None:
    other = Ragged(torch.zeros(2, 4), Lengths.of([2]))
    with pytest.raises(InputError, match=r"\(3, 8\).*\(2, 4\)"):
        maxsim_with_gradients(vectors(3, seed=0), other)


def test_token_vectors_are_trained_whole_and_in_parts() -> None:
    model: Any = build(ENCODERS["modernbert"], seed=0)
    batch = Batch(
        texts=ids((5, 2, 7)),
        others=ids((3, 3, 9), seed=1),
        negatives=ids((4,), seed=2),
        negative_counts=(0, 1, 0),
    )
    assert batch.texts is not None
    assert batch.others is not None
    assert batch.negatives is not None
    with pytest.raises(ConfigError, match="set both_ways to false"):
        Contrastive(similarity="maxsim", both_ways=True).check(model)
    objective = Contrastive(similarity="maxsim")
    losses = []
    for each in (objective, replace(objective, cache_tokens=8)):
        model.zero_grad()
        loss = each.loss(model, batch, torch.Generator())
        loss.combined.backward()
        losses.append((loss.total.detach(), model.embedding.tokens.weight.grad.clone()))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)

    def read(texts: Ragged) -> Ragged:
        return texts.with_values(F.normalize(model(texts).hidden.values, dim=-1))

    with torch.no_grad():
        candidates = Ragged.concatenate([batch.others, batch.negatives])
        scores = one_by_one(read(batch.texts), read(candidates))
    expected = F.cross_entropy(scores, torch.arange(3), reduction="sum")
    torch.testing.assert_close(losses[0][0], expected, rtol=1e-4, atol=1e-4)
