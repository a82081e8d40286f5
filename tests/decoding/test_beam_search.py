"""Beam search gives the texts of `transformers`, for one prompt or many."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads import BeamSearch, generate
from manyheads.errors import ConfigError
from tests.decoding.peers import FAMILIES, SEQ2SEQS, pair, theirs_alone, tokens
from tests.parity.comparing import texts

PROMPTS = [text.tolist() for text in texts((7, 1, 13, 4), seed=1)]
NEW = 14


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("beams", "theirs_say"),
    [
        (BeamSearch(), {"num_beams": 4}),
        (BeamSearch(num_beams=2, length_penalty=0.0), {"num_beams": 2, "length_penalty": 0.0}),
        (BeamSearch(num_beams=3, length_penalty=-1.5), {"num_beams": 3, "length_penalty": -1.5}),
        (BeamSearch(num_beams=3, early_stopping=True), {"num_beams": 3, "early_stopping": True}),
        (
            BeamSearch(num_beams=5, length_penalty=2.0, early_stopping="never"),
            {"num_beams": 5, "length_penalty": 2.0, "early_stopping": "never"},
        ),
    ],
)
def test_texts_are_those_of_transformers(
    family: str, beams: BeamSearch, theirs_say: dict[str, Any]
) -> None:
    peer, ours = pair(family)
    stops = frequent(ours)
    written = generate(ours, PROMPTS, max_new_tokens=NEW, sampling=beams, eos_token_ids=stops)
    expected = theirs_alone(peer, PROMPTS, max_new_tokens=NEW, eos_token_id=stops, **theirs_say)
    assert tokens(written) == expected


@pytest.mark.parametrize("family", ["gpt2", "marian"])
def test_penalties_and_forbidden_tokens_count_as_in_transformers(family: str) -> None:
    peer, ours = pair(family)
    options = {"repetition_penalty": 1.3}
    written = generate(
        ours, PROMPTS, max_new_tokens=NEW, sampling=BeamSearch(num_beams=3), **options
    )
    expected = theirs_alone(peer, PROMPTS, max_new_tokens=NEW, num_beams=3, **options)
    assert tokens(written) == expected


@settings(max_examples=8)
@given(stop=st.sets(st.integers(3, 50), min_size=1, max_size=6), width=st.integers(2, 5))
def test_any_stop_ids_end_texts_as_in_transformers(stop: set[int], width: int) -> None:
    peer, ours = pair("llama")
    stops = sorted(stop)
    written = generate(
        ours,
        PROMPTS[:2],
        max_new_tokens=8,
        sampling=BeamSearch(num_beams=width),
        eos_token_ids=stops,
    )
    more = {"max_new_tokens": 8, "num_beams": width, "pad_token_id": 0}
    assert tokens(written) == theirs_alone(peer, PROMPTS[:2], eos_token_id=stops, **more)


@pytest.mark.parametrize("family", SEQ2SEQS)
def test_a_batch_of_transformers_gives_the_same_texts(family: str) -> None:
    peer, ours = pair(family)
    sources = torch.tensor([PROMPTS[0], PROMPTS[2][:7], PROMPTS[2][-7:]])
    stops = frequent(ours)
    written = generate(
        ours, sources, max_new_tokens=NEW, sampling=BeamSearch(num_beams=3), eos_token_ids=stops
    )
    result = peer.generate(
        sources,
        attention_mask=torch.ones_like(sources),
        max_new_tokens=NEW,
        num_beams=3,
        do_sample=False,
        eos_token_id=stops,
    )
    for ours_wrote, row in zip(written, result[:, 1:].tolist(), strict=True):
        assert list(ours_wrote.ids) == row[: len(ours_wrote.ids)]
        # They fill up with the padding, or with a stop id where the padding is 0.
        assert set(row[len(ours_wrote.ids) :]) <= {peer.config.pad_token_id, stops[0]}


def test_logprobs_are_the_models_own() -> None:
    ours = pair("gpt2")[1]
    [written] = generate(
        ours, PROMPTS[:1], max_new_tokens=6, sampling=BeamSearch(num_beams=3), logprobs=True
    )
    ids = torch.tensor([[*PROMPTS[0], *written.ids]])
    with torch.no_grad():
        logits = ours(ids).logits[0, len(PROMPTS[0]) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(written.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(written.logprobs), expected, atol=1e-4, rtol=0)


def test_more_beams_never_find_a_less_likely_text_than_one_of_all() -> None:
    """With as many beams as there are texts of two tokens, the likeliest of all is found."""
    ours = pair("gpt2")[1]
    prompt = PROMPTS[3]
    options: dict[str, Any] = {"max_new_tokens": 2, "eos_token_ids": (), "logprobs": True}
    [best] = generate(ours, [prompt], sampling=BeamSearch(num_beams=61), **options)
    with torch.no_grad():
        first = ours(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        pairs = torch.tensor([[*prompt, token] for token in range(61)])
        second = ours(pairs).logits[:, -1].log_softmax(-1)
    sums = first[:, None] + second
    assert best.ids == tuple(divmod(int(sums.argmax()), 61))
    assert sum(best.logprobs or ()) == pytest.approx(float(sums.max()), abs=1e-4)


def test_a_single_beam_is_greedy() -> None:
    ours = pair("t5")[1]
    one = generate(ours, PROMPTS, max_new_tokens=6, sampling=BeamSearch(num_beams=1))
    assert one == generate(ours, PROMPTS, max_new_tokens=6)


def test_stop_strings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"BeamSearch: use eos_token_ids, or sampling=Greedy"):
        generate(pair("gpt2")[1], PROMPTS, sampling=BeamSearch(), stop_strings="end")


@cache
def frequent(model: Any) -> list[int]:
    """Tokens that come up soon, so that beams do end on the way."""
    plain = generate(
        model, PROMPTS, max_new_tokens=NEW, eos_token_ids=(), sampling=BeamSearch(num_beams=3)
    )
    return sorted({plain[0].ids[2], plain[1].ids[5]})
