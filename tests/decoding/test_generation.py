"""The tokens of `transformers`, whatever the batch, the cache and the kind of prompts."""

import functools
from typing import Any

import pytest
import torch

from manyheads import (
    BeamSearch,
    DynamicCache,
    Greedy,
    Ragged,
    Sample,
    StaticCache,
    build,
    generate,
)
from manyheads.decoding.steps.cached import CachedSteps
from tests.decoding.peers import DECODERS, FAMILIES, NEW, pair, theirs_alone, tokens
from tests.models import zoo
from tests.parity.comparing import texts

PROMPTS = [text.tolist() for text in texts((7, 1, 23, 12, 2))]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_in_batches_of_mixed_length(family: str) -> None:
    assert greedy(family) == theirs_alone(pair(family)[0], PROMPTS)


@functools.cache
def greedy(family: str) -> list[list[int]]:
    return tokens(generate(pair(family)[1], PROMPTS, max_new_tokens=NEW))


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_stop_where_those_of_transformers_do_and_the_others_go_on(family: str) -> None:
    peer, ours = pair(family)
    whole = generate(ours, PROMPTS, max_new_tokens=NEW, eos_token_ids=())
    stops = sorted({whole[0].ids[3], whole[3].ids[8]})
    written = generate(ours, PROMPTS, max_new_tokens=NEW, eos_token_ids=stops)
    assert tokens(written) == theirs_alone(peer, PROMPTS, eos_token_id=stops)
    assert len(written[0].ids) < NEW


@pytest.mark.parametrize("family", FAMILIES)
def test_a_penalty_for_repeating_changes_texts_as_in_transformers(family: str) -> None:
    peer, ours = pair(family)
    written = generate(ours, PROMPTS, max_new_tokens=NEW, repetition_penalty=1.4)
    assert tokens(written) == theirs_alone(peer, PROMPTS, repetition_penalty=1.4)
    assert tokens(written) != greedy(family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "cache",
    [
        DynamicCache(initial_size=1),
        DynamicCache(ring_buffers=False),
        StaticCache(size=46),
        StaticCache(size=46, ring_buffers=False),
    ],
)
def test_every_cache_gives_the_same_tokens(family: str, cache: DynamicCache | StaticCache) -> None:
    ours = pair(family)[1]
    written = generate(ours, PROMPTS, max_new_tokens=NEW, cache=cache)
    assert tokens(written) == greedy(family)


@pytest.mark.parametrize("name", zoo.DECODERS)
def test_steps_give_the_last_logits_of_a_whole_forward(name: str) -> None:
    model = zoo.small(zoo.DECODERS[name])
    steps = CachedSteps(model, DynamicCache())
    sequences = zoo.ids((5, 1, 9)).to_list()
    result = [steps.start(Ragged.from_list(sequences))]
    for token in (3, 8):
        result.append(steps.next(torch.tensor([token] * 3)))
    steps.select([2, 0])
    result.append(steps.next(torch.tensor([4, 4])))
    for step, logits in enumerate(result):
        order = (2, 0) if step == 3 else (0, 1, 2)
        more = torch.tensor([3, 8, 4][:step], dtype=torch.long)
        for row, index in zip(logits, order, strict=True):
            with torch.no_grad():
                whole = model(torch.cat([sequences[index], more])[None]).logits[0, -1]
            torch.testing.assert_close(row, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", zoo.SEQ2SEQS)
def test_encoder_decoders_of_every_kind_step_as_they_run_whole(name: str) -> None:
    model = zoo.small(zoo.SEQ2SEQS[name])
    steps = CachedSteps(model, DynamicCache(), start_id=1)
    sources = zoo.ids((4, 7))
    result = [steps.start(sources), steps.next(torch.tensor([5, 6]))]
    for step, logits in enumerate(result):
        targets = [torch.tensor([1, second][: step + 1]) for second in (5, 6)]
        with torch.no_grad():
            whole = model(sources, Ragged.from_list(targets)).logits.to_list()
        expected = torch.stack([each[-1] for each in whole])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_logprobs_are_those_of_a_whole_forward_whatever_the_penalty_and_temperature() -> None:
    ours = pair("llama")[1]
    options = {"repetition_penalty": 1.3, "sampling": Sample(temperature=0.5, top_k=5), "seed": 3}
    for prompt, written in zip(
        PROMPTS, generate(ours, PROMPTS, max_new_tokens=9, logprobs=True, **options), strict=True
    ):
        with torch.no_grad():
            logits = ours(torch.tensor([[*prompt, *written.ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(written.ids)[:, None])[:, 0]
        assert written.logprobs is not None
        torch.testing.assert_close(torch.tensor(written.logprobs), expected, atol=1e-4, rtol=0)


def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch() -> None:
    ours = pair("llama")[1]
    options: dict[str, Any] = {
        "sampling": Sample(temperature=2.0),
        "max_new_tokens": 12,
        "eos_token_ids": (),
    }
    alone = generate(ours, PROMPTS[:1], seed=5, **options)
    together = generate(ours, PROMPTS, seed=5, **options)
    assert tokens(alone) == tokens(together)[:1]
    assert tokens(together) == tokens(generate(ours, PROMPTS, seed=5, **options))
    assert tokens(together) != tokens(generate(ours, PROMPTS, seed=6, **options))
    # Others that stop and leave change nothing either.
    stopping = options | {"eos_token_ids": (together[1].ids[2], together[3].ids[0])}
    for stopped, whole in zip(generate(ours, PROMPTS, seed=5, **stopping), together, strict=True):
        assert stopped.ids == whole.ids[: len(stopped.ids)]


def test_one_prompt_passed_twice_is_drawn_twice() -> None:
    ours = pair("llama")[1]
    one, other = generate(ours, [PROMPTS[0]] * 2, max_new_tokens=12, sampling=Sample(), seed=0)
    assert one.ids != other.ids


def test_drawing_leaves_the_global_generator_alone() -> None:
    ours = pair("gpt2")[1]
    before = torch.get_rng_state()
    generate(ours, PROMPTS, max_new_tokens=3, sampling=Sample())
    assert torch.equal(before, torch.get_rng_state())


def test_prompts_may_be_lists_tensors_a_rectangle_or_ragged() -> None:
    ours = pair("gpt2")[1]
    rows = torch.tensor([PROMPTS[0], PROMPTS[2][:7]])
    expected = tokens(generate(ours, rows.tolist(), max_new_tokens=5))
    for prompts in (rows, list(rows), Ragged.from_list(list(rows)), tuple(rows.tolist())):
        assert tokens(generate(ours, prompts, max_new_tokens=5)) == expected


def test_a_text_that_stops_has_the_reason() -> None:
    ours = pair("gpt2")[1]
    [whole] = generate(ours, PROMPTS[:1], max_new_tokens=6, eos_token_ids=())
    assert whole.finish_reason == "length"
    assert len(whole.ids) == 6
    [cut] = generate(ours, PROMPTS[:1], max_new_tokens=6, eos_token_ids=[whole.ids[3]])
    place = whole.ids.index(whole.ids[3])
    assert (cut.ids, cut.finish_reason) == (whole.ids[: place + 1], "eos")


def test_an_end_that_was_forced_is_no_decision_to_stop() -> None:
    ours = pair("marian")[1]
    [written] = generate(ours, PROMPTS[:1], max_new_tokens=3)
    assert (written.ids[-1], written.finish_reason) == (0, "length")


@pytest.mark.parametrize("sampling", [Greedy(), Sample(), BeamSearch(num_beams=3)])
def test_nothing_to_write_and_nothing_to_go_on_from_are_no_errors(sampling: Any) -> None:
    ours = pair("gpt2")[1]
    assert generate(ours, [], sampling=sampling) == []
    written = generate(ours, PROMPTS, max_new_tokens=0, sampling=sampling, logprobs=True)
    assert [(each.ids, each.finish_reason, each.logprobs) for each in written] == [
        ((), "length", ())
    ] * len(PROMPTS)


def test_an_empty_prompt_begins_where_texts_begin() -> None:
    ours = pair("llama")[1]
    assert generate(ours, [[]], max_new_tokens=5) == generate(ours, [[0]], max_new_tokens=5)


def test_suppressed_tokens_are_never_generated() -> None:
    ours = pair("gpt2")[1]
    [plain] = generate(ours, PROMPTS[:1], max_new_tokens=8, eos_token_ids=())
    [other] = generate(
        ours, PROMPTS[:1], max_new_tokens=8, eos_token_ids=(), suppress_tokens=plain.ids
    )
    assert not set(plain.ids) & set(other.ids)


def test_progress_is_reported_to_the_end() -> None:
    message: list[tuple[int, int]] = []
    ours = pair("gpt2")[1]
    for sampling in (Greedy(), BeamSearch(num_beams=2)):
        message.clear()
        generate(
            ours,
            PROMPTS,
            max_new_tokens=9,
            sampling=sampling,
            on_progress=lambda *done: message.append(done),
        )
        assert [done for done, _ in message] == sorted(done for done, _ in message)
        assert message[-1] == (9 * len(PROMPTS),) * 2


def test_progress_counts_tokens_that_were_generated() -> None:
    ours = pair("gpt2")[1]
    for sampling in (Greedy(), BeamSearch(num_beams=2)):
        counts: list[tuple[int, int]] = []
        texts = generate(
            ours,
            PROMPTS,
            max_new_tokens=9,
            sampling=sampling,
            eos_token_ids=tuple(range(ours.config.embedding.vocabulary)),
            on_progress=lambda *done, counts=counts: counts.append(done),
        )
        total = sum(len(text.ids) for text in texts)
        assert total < 9 * len(PROMPTS)
        assert counts[-1] == (total, total)


def test_half_precision_writes_too() -> None:
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0, dtype=torch.bfloat16)
    for sampling in (Greedy(), Sample(top_p=0.9), BeamSearch(num_beams=2)):
        [written] = generate(model, [[3, 4]], max_new_tokens=5, sampling=sampling, logprobs=True)
        assert len(written.ids) == len(written.logprobs or ()) == 5


@pytest.mark.parametrize("family", DECODERS)
def test_gradients_stay_on_for_whoever_had_them_on(family: str) -> None:
    generate(pair(family)[1], PROMPTS[:1], max_new_tokens=2)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
