"""The choice of tokens on the device counts its steps and keeps the last of them in a ring."""

import pytest
import torch

from manyheads.decoding.sampling import BeamSearch, Greedy, Sample, TokenConstraints
from manyheads.decoding.steps.token_choice import (
    RING,
    ChoiceState,
    TokenChoice,
    why_not_recorded,
)

VOCABULARY = 11


@torch.inference_mode()
def test_tokens_of_more_steps_than_the_ring_holds_replace_the_first() -> None:
    state = ChoiceState(3, VOCABULARY, torch.device("cpu"))
    state.begin(TokenChoice(), Greedy(), [[1], [2]])
    for step in range(RING + 2):
        # Two of the three rows are in use.
        logits = torch.zeros(2, VOCABULARY)
        logits[0, step % 7], logits[1, 8] = 1.0, 1.0
        state.choose(logits)
    assert state.steps.tolist() == [RING + 2, RING + 2, 0]
    assert state.tokens[:3, 0].tolist() == [RING % 7, (RING + 1) % 7, 2]
    assert state.tokens[:, 1].tolist() == [8] * RING
    assert state.ids.tolist() == [(RING + 1) % 7, 8, 0]


@torch.inference_mode()
def test_a_token_is_drawn_by_the_random_number_of_its_step() -> None:
    state = ChoiceState(2, VOCABULARY, torch.device("cpu"))
    state.begin(TokenChoice(sampled=True), Sample(), [[1], [2]])
    uniforms = (torch.arange(2 * 8).reshape(2, 8) % VOCABULARY + 0.5) / VOCABULARY
    state.write_uniforms(0, uniforms)
    for _ in range(8):
        state.choose(torch.zeros(2, VOCABULARY))
    assert state.tokens[:8].T.tolist() == (torch.arange(16).reshape(2, 8) % VOCABULARY).tolist()


@torch.inference_mode()
def test_a_chosen_token_is_penalized_from_the_next_step_on() -> None:
    state = ChoiceState(1, VOCABULARY, torch.device("cpu"))
    choice = TokenChoice(penalty=4.0, suppressed=(7,), logprobs=True)
    state.begin(choice, Greedy(), [[3]])
    logits = torch.arange(VOCABULARY, dtype=torch.float32)[None] / 2
    logits[0, 7] = 20.0
    for _ in range(3):
        state.choose(logits)
    assert state.tokens[:3, 0].tolist() == [10, 9, 8]
    torch.testing.assert_close(state.logprobs[:3, 0], logits.log_softmax(-1)[0, [10, 9, 8]])


@pytest.mark.parametrize(
    ("sampling", "forced", "reason"),
    [
        (Greedy(), None, None),
        (Sample(top_k=3), None, None),
        (BeamSearch(), None, "beam"),
        (Greedy(), 5, "forced"),
    ],
)
def test_what_cannot_be_recorded_is_refused_with_the_reason(
    sampling: Greedy | Sample | BeamSearch, forced: int | None, reason: str | None
) -> None:
    constraints = TokenConstraints(max_new_tokens=9, forced_last=forced)
    result = why_not_recorded(sampling, constraints, torch.device("cpu"))
    assert result is None if reason is None else reason in str(result)
