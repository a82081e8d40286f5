"""Scores are narrowed as the processors of `transformers` narrow them, and drawn by chance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from manyheads import Sample
from manyheads.decoding.choosing import draw, own_logprobs
from manyheads.decoding.rules import Penalty, Rules
from manyheads.errors import ConfigError
from tests.messages import refuses

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


def theirs(sample: Sample, penalty: float, said: Tensor, given: Tensor) -> Tensor:
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
    return processors(said, given)


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.6])
def test_scores_are_narrowed_as_there_in_the_same_order(sample: Sample, penalty: float) -> None:
    given = scores(6)
    said = torch.randint(VOCABULARY, (6, 9), generator=torch.Generator().manual_seed(1))
    ours = given
    if penalty != 1.0:
        ours = Penalty.of(penalty, said.tolist(), VOCABULARY, given.device).apply(given)
    found, expected = sample.narrow(ours), theirs(sample, penalty, said, given)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected)


def test_draws_follow_the_probabilities() -> None:
    sample = Sample(temperature=1.5, top_k=6)
    narrowed = sample.narrow(scores(1))
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
    narrowed = Sample(top_k=kept).narrow(scores(3, seed))
    drawn = draw(narrowed, torch.full((3,), chance, dtype=torch.float64))
    assert narrowed.gather(1, drawn[:, None]).isfinite().all()


def test_logprobs_are_a_log_softmax() -> None:
    given, ids = scores(4), torch.tensor([0, 39, 7, 7])
    expected = given.log_softmax(-1)[torch.arange(4), ids]
    torch.testing.assert_close(own_logprobs(given, ids), expected)


def test_rules_force_the_first_and_the_last_and_forbid_the_rest() -> None:
    rules = Rules(new_tokens=5, never=(1, 2), first=3, last=4)
    given = scores(2)
    assert rules.apply(given, 0).argmax(-1).tolist() == [3, 3]
    assert rules.apply(given, 4).argmax(-1).tolist() == [4, 4]
    between = rules.apply(given, 2)
    assert between.isinf().nonzero()[:, 1].tolist() == [1, 2, 1, 2]
    assert not given.isinf().any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"temperature": 0.0},
            "temperature=0.0 cannot divide scores: "
            "use a number above 0, or Greedy() for the likeliest token.",
        ),
        (
            {"temperature": float("nan")},
            "temperature=nan cannot divide scores: "
            "use a number above 0, or Greedy() for the likeliest token.",
        ),
        ({"top_k": 0}, "top_k=0 leaves no token: use 1 or more, or None."),
        ({"top_p": 0.0}, "top_p=0.0 is no share: use 0 < top_p <= 1, or None."),
        ({"top_p": 1.1}, "top_p=1.1 is no share: use 0 < top_p <= 1, or None."),
        ({"min_p": -0.1}, "min_p=-0.1 is no share: use 0 <= min_p <= 1, or None."),
    ],
)
def test_values_that_mean_nothing_are_refused(given: dict[str, float], message: str) -> None:
    with refuses(ConfigError, message):
        Sample(**given)
