"""Logits are filtered as the processors of `transformers` filter them, and tokens drawn."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from manyheads import BeamSearch, Sample
from manyheads.decoding.sampling import (
    MOST_TIES,
    RepetitionPenalty,
    TokenConstraints,
    draw,
    most_likely,
    token_logprobs,
)
from manyheads.errors import ConfigError

VOCABULARY = 40
SAMPLES = (
    Sample(),
    Sample(temperature=0.3),
    Sample(top_k=5),
    Sample(top_k=1000),
    Sample(top_p=0.8),
    Sample(top_p=1e-6),
    Sample(min_p=0.2),
    Sample(min_p=1.0),
    Sample(temperature=1.7, top_k=20, top_p=0.9, min_p=0.02),
)


def scores(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, VOCABULARY, generator=generator)


def peer(sample: Sample, penalty: float, said: Tensor, logits: Tensor) -> Tensor:
    """The same through the list of processors that their `generate` would make."""
    narrowed = {"top_k": sample.top_k, "top_p": sample.top_p, "min_p": sample.min_p}
    config = GenerationConfig(
        do_sample=True,
        temperature=sample.temperature,
        repetition_penalty=penalty,
        **narrowed,
    )
    small = GPT2Config(vocab_size=VOCABULARY, n_embd=4, n_layer=1, n_head=1, n_positions=8)
    model = GPT2LMHeadModel(small)
    processors = model._get_logits_processor(config, input_ids_seq_length=said.shape[1])
    return processors(said, logits)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.6])
def test_scores_are_narrowed_as_in_transformers_in_the_same_order(
    sample: Sample, penalty: float
) -> None:
    logits = scores(6)
    said = torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(1))
    ours = logits
    if penalty != 1.0:
        ours = RepetitionPenalty.of(penalty, said.tolist(), VOCABULARY, logits.device).apply(logits)
    result, expected = sample.filter_logits(ours), peer(sample, penalty, said, logits)
    assert torch.equal(result.isinf(), expected.isinf())
    torch.testing.assert_close(result, expected)


def test_a_large_vocabulary_is_narrowed_as_if_it_were_sorted() -> None:
    logits = torch.randn(3, 4 * MOST_TIES, generator=torch.Generator().manual_seed(0)).bfloat16()
    both = Sample(top_k=50, top_p=0.8).filter_logits(logits)
    alone = Sample(top_k=50).filter_logits(logits)
    torch.testing.assert_close(both, Sample(top_p=0.8).filter_logits(alone))


def test_of_equal_scores_the_first_is_taken() -> None:
    assert most_likely(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 0.0]])).tolist() == [1, 0]


def test_draws_follow_the_probabilities() -> None:
    sample = Sample(temperature=1.5, top_k=6)
    narrowed = sample.filter_logits(scores(1))
    count = 20_000
    chances = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = draw(narrowed.expand(count, -1), chances)
    shares = torch.bincount(drawn, minlength=VOCABULARY) / count
    torch.testing.assert_close(shares, narrowed.softmax(-1)[0], atol=0.012, rtol=0)
    assert not shares[narrowed[0].isinf()].any()


@given(
    seed=st.integers(0, 50),
    chance=st.sampled_from([0.0, 1e-12, 0.5, 1 - 2**-30, 1 - 2**-53]),
    kept=st.integers(1, 5),
)
def test_no_chance_draws_a_token_that_is_out(seed: int, chance: float, kept: int) -> None:
    narrowed = Sample(top_k=kept).filter_logits(scores(3, seed))
    drawn = draw(narrowed, torch.full((3,), chance, dtype=torch.float64))
    assert narrowed.gather(1, drawn[:, None]).isfinite().all()


def test_logprobs_are_a_log_softmax() -> None:
    logits, ids = scores(4), torch.tensor([0, 39, 7, 7])
    expected = logits.log_softmax(-1)[torch.arange(4), ids]
    torch.testing.assert_close(token_logprobs(logits, ids), expected)


def test_constraints_force_the_first_and_the_last_and_suppress_others() -> None:
    constraints = TokenConstraints(
        max_new_tokens=5, suppressed=(1, 2), forced_first=3, forced_last=4
    )
    logits = scores(2)
    assert constraints.apply(logits, 0).argmax(-1).tolist() == [3, 3]
    assert constraints.apply(logits, 4).argmax(-1).tolist() == [4, 4]
    between = constraints.apply(logits, 2)
    assert between.isinf().nonzero()[:, 1].tolist() == [1, 2, 1, 2]
    assert not logits.isinf().any()


@pytest.mark.parametrize(
    ("sampling", "options", "message"),
    [
        (Sample, {"temperature": 0.0}, r"temperature .* got 0.0: use Greedy\(\)"),
        (Sample, {"temperature": float("nan")}, "temperature must be a number, got nan"),
        (Sample, {"top_k": 0}, "top_k must be at least 1, got 0"),
        (Sample, {"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        (Sample, {"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        (Sample, {"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0.1"),
        (BeamSearch, {"num_beams": 0}, "num_beams must be at least 1, got 0"),
        (BeamSearch, {"num_beams": True}, "num_beams must be an integer, got True"),
        (BeamSearch, {"length_penalty": float("inf")}, "length_penalty must be finite, got inf"),
    ],
)
def test_wrong_values_are_refused(sampling: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling(**options)
