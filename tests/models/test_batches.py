"""The sequences of a batch share nothing but the forward, in every kind of model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vision import VisionConfig
from manyheads.parts.experts import MixtureOfExperts
from manyheads.ragged import Ragged
from tests.models.zoo import (
    ENCODERS,
    LENGTHS,
    MODELS,
    TARGETS,
    VOCABULARY,
    ids,
    images,
    small,
    values,
)

Item = Any
TEXTS = [name for name in MODELS if not name.startswith("vision")]


def items(config: ModelConfig, seed: int = 0) -> list[Item]:
    """What a batch is made of: texts, pairs of texts, or images."""
    if isinstance(config, VisionConfig):
        return [image + seed for image in images()]
    texts = ids(seed=seed).to_list()
    if isinstance(config, Seq2SeqConfig):
        return list(zip(texts, ids(TARGETS, seed=seed + 1).to_list(), strict=True))
    return texts


def run(config: ModelConfig, batch: Sequence[Item]) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and scores of each."""
    model = small(config)
    if isinstance(config, VisionConfig):
        output = model(list(batch))
    elif isinstance(config, Seq2SeqConfig):
        output = model(*(Ragged.from_list(list(side)) for side in zip(*batch, strict=True)))
    else:
        output = model(Ragged.from_list(list(batch)))
    logits = output.logits
    each = logits.to_list() if isinstance(logits, Ragged) else list(logits)
    return list(zip(output.hidden.to_list(), each, strict=True))


# Of the largest value, in float32: what docs/troubleshooting.md promises.
ROUNDING = 1e-5


def assert_near(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        assert one.shape == other.shape
        if one.numel():
            assert (one - other).abs().max() <= ROUNDING * other.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_batch_gives_the_same_bits(name: str) -> None:
    config = MODELS[name]
    with torch.no_grad():
        first, second = run(config, items(config)), run(config, items(config))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("name", MODELS)
def test_two_sequences_of_a_batch_never_meet(name: str) -> None:
    config = MODELS[name]
    batch, others = items(config), items(config, seed=5)
    mixture = any(isinstance(part, MixtureOfExperts) for part in small(config).modules())
    with torch.no_grad():
        expected = run(config, batch)
        for rest in range(2):
            kept = range(rest, len(batch), 2)
            changed = [batch[at] if at in kept else others[at] for at in range(len(batch))]
            result = run(config, changed)
            for at in kept:
                if mixture:
                    # Its experts compute groups of another size, which may round differently.
                    assert_near(result[at], expected[at])
                else:
                    assert torch.equal(result[at][0], expected[at][0])
                    assert torch.equal(result[at][1], expected[at][1])


@pytest.mark.parametrize("name", MODELS)
def test_a_permuted_batch_gives_permuted_results_up_to_rounding(name: str) -> None:
    config = MODELS[name]
    batch = items(config)
    order = [3, 0, 4, 2, 1][-len(batch) :] if len(batch) == 5 else [2, 0, 3, 1]
    with torch.no_grad():
        expected, result = run(config, batch), run(config, [batch[index] for index in order])
    for place, index in enumerate(order):
        assert_near(result[place], expected[index])


@pytest.mark.parametrize("name", MODELS)
def test_a_sequence_alone_is_as_in_company_up_to_rounding(name: str) -> None:
    config = MODELS[name]
    batch = items(config)
    with torch.no_grad():
        expected = run(config, batch)
        for index in (1, 2):
            assert_near(run(config, [batch[index]])[0], expected[index])


@pytest.mark.parametrize("name", TEXTS)
def test_an_empty_sequence_is_legal_and_changes_nothing(name: str) -> None:
    config = MODELS[name]
    filled = [
        item for item in items(config) if all(map(len, item if isinstance(item, tuple) else [item]))
    ]
    nothing: Any = torch.zeros(0, dtype=torch.long)
    nothing = (nothing, nothing) if isinstance(config, Seq2SeqConfig) else nothing
    with torch.no_grad():
        expected = run(config, filled)
        result = run(config, [nothing, *filled, nothing])
    assert result[0][0].shape == result[-1][0].shape == (0, 32)
    for one, other in zip(result[1:-1], expected, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("name", TEXTS)
def test_the_gradient_of_one_sequence_touches_only_its_own_words(name: str) -> None:
    config = MODELS[name]
    model, half = small(config), VOCABULARY // 2
    first, second = torch.arange(half), torch.arange(half, VOCABULARY)
    sides = [Ragged.from_list([first, second])]
    if isinstance(config, Seq2SeqConfig):
        sides.append(Ragged.from_list([first[:5], second[:4]]))
    hidden = model(*sides).hidden
    tables = [table for table in model.parameters() if table.shape == (VOCABULARY, 32)]
    gradients = torch.autograd.grad(hidden.of(0)[:, 0].sum(), tables, allow_unused=True)
    touched = sum(gradient.abs().sum(1) for gradient in gradients if gradient is not None)
    assert not touched[half:].any()
    assert (touched[:5] > 1e-4).all()


@settings(max_examples=10)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_any_batch_may_be_shuffled(lengths: list[int], random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    model, batch = small(ENCODERS["modernbert"]), ids(lengths)
    with torch.no_grad():
        expected, result = model(batch).logits, model(batch.select(order)).logits
    if result.values.numel():
        off = (result.values - expected.select(order).values).abs().max()
        assert off <= ROUNDING * expected.values.abs().max()


def test_the_batch_has_all_that_is_hard() -> None:
    assert 0 in LENGTHS
    assert 1 in LENGTHS
    assert 0 in TARGETS
    assert values(ids()).unique().numel() > 10
