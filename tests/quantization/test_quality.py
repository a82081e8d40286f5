"""What integer weights cost, measured on a text."""

import copy
from typing import Any

import pytest
import torch

from manyheads import build, load
from manyheads.errors import InputError
from manyheads.quantization import measure_quality, quantize_weights

TEXTS = ["The lighthouse was lit in 1867, and its keeper wrote down every ship that passed."]


@pytest.fixture(scope="module")
def house() -> Any:
    return load("house-gpt")


def test_a_model_loses_nothing_beside_itself(house: Any) -> None:
    quality = measure_quality(house, house, TEXTS)
    assert quality.change == 0
    assert quality.cosine == pytest.approx(1)
    assert quality.weights is None


def test_perplexity_is_that_of_the_next_tokens(house: Any) -> None:
    quality = measure_quality(house, house, TEXTS)
    ids = torch.tensor(house.tokenizer.encode(TEXTS[0]).ids)
    with torch.no_grad():
        scores = house(ids[None]).logits[0, :-1].log_softmax(-1)
    losses = -scores.gather(1, ids[1:, None])
    assert quality.perplexity == pytest.approx(float(losses.mean().exp()), rel=1e-4)
    assert quality.tokens == len(ids)


def test_eight_bits_change_little_and_take_a_quarter_of_the_memory(house: Any) -> None:
    small = copy.deepcopy(house)
    quantize_weights(small, "int8")
    quality = measure_quality(small, house, TEXTS)
    assert quality.weights == "int8"
    assert quality.change is not None
    assert abs(quality.change) < 0.05
    assert quality.cosine > 0.99
    assert quality.megabytes < 0.27 * quality.original_megabytes
    assert "int8 weights on" in str(quality)
    assert "MB instead of" in str(quality)


def test_an_encoder_has_no_perplexity() -> None:
    bert = load("house-bert")
    quality = measure_quality(bert, bert, TEXTS)
    assert quality.perplexity is None
    assert "perplexity" not in str(quality)


def test_a_model_without_tokenizer_is_refused() -> None:
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    with pytest.raises(InputError, match="tokenizer"):
        measure_quality(model, model)
