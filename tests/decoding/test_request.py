"""What cannot be generated is refused before the first step, with a remedy."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads import Ragged, StaticCache, build, generate
from manyheads.errors import ConfigError, InputError, ManyheadsError
from manyheads.models import NoReadout
from tests.decoding.peers import pair
from tests.models import zoo


def gpt2() -> Any:
    return zoo.small(zoo.DECODERS["gpt2"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zoo.ENCODERS["bert"], "an Encoder .*: load a decoder or an encoder-decoder"),
        (zoo.VISIONS["vit"], "a Vision .*: load a decoder or an encoder-decoder"),
        (
            replace(zoo.DECODERS["gpt2"], readout=NoReadout()),
            r"NoReadout .*: use a model with readout=LanguageHead\(\)",
        ),
    ],
)
def test_models_that_cannot_generate_text(config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(build(config, seed=0), [[1]])


def test_a_model_in_training() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0).train()
    with pytest.raises(InputError, match=r"training mode.*: call model\.eval\(\) first"):
        generate(model, [[1]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            [[1], [2, 29]],
            "prompt 1: token id 29 .*: use ids from 0 to 28",
        ),
        ([[-1]], "prompt 0: token id -1 .*: use ids from 0 to 28"),
        (
            [[1], []],
            "prompt 1 is empty .*: give it at least one token",
        ),
        (
            torch.tensor([[1.5, 2.0]]),
            "prompt 0 .*: give one list of integers per prompt",
        ),
        ([5, 6], r"prompt 0 .* number 5: give a list of prompts, \[\[5, 6, 7\]\]"),
        ([[1], "two"], "prompts mix texts and token ids: give all of one kind"),
        (
            torch.tensor([1, 2]),
            r"\(batch, length\), got \(2,\): .* ids\[None\]",
        ),
        ([[0.5]], "prompt 0 .*: give one list of integers per prompt"),
        (
            Ragged.from_list([torch.tensor([30])]),
            "prompt 0: token id 30 .*: use ids from 0 to 28",
        ),
    ],
)
def test_prompts_that_cannot_be_read(prompts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        generate(gpt2(), prompts, max_new_tokens=3)


@pytest.mark.parametrize("option", ["eos_token_ids", "suppress_tokens"])
def test_tokens_outside_the_vocabulary(option: str) -> None:
    options: Any = {option: [3, 29]}
    with pytest.raises(ConfigError, match=f"{option} .* got 29: use 0 to 28"):
        generate(gpt2(), [[1]], max_new_tokens=4, **options)


def test_a_learned_table_ends_and_the_most_that_fits_is_named() -> None:
    prompts = [[1], [2] * 60]
    with pytest.raises(InputError, match=r"60 tokens .*=5 .* 64 positions: use max_new_tokens=4"):
        generate(gpt2(), prompts, max_new_tokens=5)
    assert [len(each.ids) for each in generate(gpt2(), prompts, max_new_tokens=4)] == [4, 4]
    with pytest.raises(InputError, match=r"65 tokens .* 64 positions: shorten it to 64"):
        generate(gpt2(), [[2] * 65], max_new_tokens=1)


@pytest.mark.parametrize("name", ["sinusoidal", "llama", "alibi", "t5", "shaw", "window"])
def test_positions_that_extend_have_no_end(name: str) -> None:
    [written] = generate(
        zoo.small(zoo.DECODERS[name]), [[1] * 60], max_new_tokens=12, eos_token_ids=()
    )
    assert len(written.ids) == 12


def test_a_fixed_cache_that_is_too_small_is_found_before_the_first_step() -> None:
    remedy = r"use StaticCache\(size=9\) or more, or DynamicCache\(\)"
    with pytest.raises(ConfigError, match=f"a cache of 8 tokens .*: {remedy}"):
        generate(gpt2(), [[1], [2] * 6], max_new_tokens=4, cache=StaticCache(size=8))
    # The last token is never read, and a ring needs no more room than its window.
    generate(gpt2(), [[1], [2] * 6], max_new_tokens=4, cache=StaticCache(size=9))
    generate(
        zoo.small(zoo.DECODERS["window"]), [[2] * 6], max_new_tokens=9, cache=StaticCache(size=8)
    )


def test_an_encoder_decoder_needs_a_start_token() -> None:
    model = zoo.small(zoo.SEQ2SEQS["t5"])
    with pytest.raises(InputError, match="pass decoder_start_token_id"):
        generate(model, [[1, 2]], max_new_tokens=3)
    assert len(generate(model, [[1, 2]], max_new_tokens=3, decoder_start_token_id=0)[0].ids) == 3
    with pytest.raises(InputError, match=r"decoder_start_token_id=0 .*: leave it out"):
        generate(gpt2(), [[1]], max_new_tokens=3, decoder_start_token_id=0)


def test_another_start_is_another_text() -> None:
    ours = pair("t5")[1]
    texts = {
        generate(ours, [[5, 6]], max_new_tokens=8, decoder_start_token_id=one)[0].ids
        for one in range(6)
    }
    assert len(texts) > 1


def test_forbidden_words_of_several_tokens_are_not_skipped_in_silence() -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    model.source_config = {"bad_words_ids": [[1], [2, 3]]}
    with pytest.raises(ManyheadsError, match=r"^bad_words_ids .*: pass suppress_tokens="):
        generate(model, [[1]])
    generate(model, [[1]], max_new_tokens=1, suppress_tokens=())
