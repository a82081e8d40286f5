"""What cannot be written is refused before the first step, with a way out."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads import Fixed, NoReadout, Ragged, build, generate
from manyheads.errors import ConfigError, InputError, ManyheadsError
from tests.decoding.peers import pair
from tests.messages import refuses
from tests.models import zoo


def gpt2() -> Any:
    return zoo.small(zoo.DECODERS["gpt2"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (zoo.ENCODERS["bert"], "Encoder reads and does not write: use a Decoder or a Seq2Seq."),
        (zoo.VISIONS["vit"], "Vision reads and does not write: use a Decoder or a Seq2Seq."),
        (
            replace(zoo.DECODERS["gpt2"], readout=NoReadout()),
            "a readout of NoReadout names no words: use a model with readout=LanguageHead().",
        ),
    ],
)
def test_models_that_write_no_words(config: Any, message: str) -> None:
    with refuses(InputError, message):
        generate(build(config, seed=0), [[1]])


def test_a_model_in_training() -> None:
    model = build(zoo.DECODERS["gpt2"], seed=0).train()
    with refuses(
        InputError, "the model is in training and drops at random: call model.eval() first."
    ):
        generate(model, [[1]])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (
            [[1], [2, 29]],
            "prompt 1: token id 29 is outside vocabulary=29: use ids of 0 to 28.",
        ),
        ([[-1]], "prompt 0: token id -1 is outside vocabulary=29: use ids of 0 to 28."),
        (
            [[1], []],
            "prompt 1 is empty and the model has no token that begins texts: "
            "give it at least one token.",
        ),
        (
            torch.tensor([[1.5, 2.0]]),
            "prompt 0 is no row of token ids: give whole numbers in one row.",
        ),
        ([5, 6], "prompt 0 is the single number 5: give a list of prompts, [[5, 6, 7]]."),
        ([[1], "two"], "prompts mix texts and token ids: give all of one kind."),
        (
            torch.tensor([1, 2]),
            "prompts have shape (2,): "
            "give (batch, length), a list of prompts, or a Ragged; one prompt is ids[None].",
        ),
        ([[0.5]], "prompt 0 is no row of token ids: give whole numbers in one row."),
        (
            Ragged.from_list([torch.tensor([30])]),
            "prompt 0: token id 30 is outside vocabulary=29: use ids of 0 to 28.",
        ),
    ],
)
def test_prompts_that_cannot_be_read(prompts: Any, message: str) -> None:
    with refuses(InputError, message):
        generate(gpt2(), prompts, new_tokens=3)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"new_tokens": -1}, "new_tokens=-1 is below nothing: use 0 or more."),
        (
            {"repetition_penalty": 0.0},
            "repetition_penalty=0.0 cannot scale scores: "
            "use a number above 0, where 1 changes nothing.",
        ),
        ({"stop": ["a", ""]}, "an empty stop string is everywhere: give at least one letter."),
        ({"stop_ids": [29]}, "stop_ids=29 is outside vocabulary=29: use 0 to 28."),
        ({"never": [-1]}, "never=-1 is outside vocabulary=29: use 0 to 28."),
        ({"cache": Fixed(size=0)}, "Fixed(size=0) holds nothing: use size=1 or more."),
    ],
)
def test_wishes_that_mean_nothing(wishes: dict[str, Any], message: str) -> None:
    with refuses(ConfigError, message):
        generate(gpt2(), [[1]], **{"new_tokens": 4} | wishes)


def test_a_learned_table_ends_and_the_most_that_fits_is_named() -> None:
    prompts = [[1], [2] * 60]
    message = (
        "60 tokens and new_tokens=5 go past the model's 64 positions: "
        "use new_tokens=4 or less, or a shorter prompt."
    )
    with refuses(InputError, message):
        generate(gpt2(), prompts, new_tokens=5)
    assert [len(each.ids) for each in generate(gpt2(), prompts, new_tokens=4)] == [4, 4]
    with refuses(
        InputError, "a prompt of 65 tokens is longer than the model's 64 positions: cut it to 64."
    ):
        generate(gpt2(), [[2] * 65], new_tokens=1)


@pytest.mark.parametrize("name", ["sinusoidal", "llama", "alibi", "t5", "shaw", "window"])
def test_positions_that_extend_have_no_end(name: str) -> None:
    [written] = generate(zoo.small(zoo.DECODERS[name]), [[1] * 60], new_tokens=12, stop_ids=())
    assert len(written.ids) == 12


def test_a_fixed_cache_that_is_too_small_is_found_before_the_first_step() -> None:
    message = (
        "a cache of 8 tokens cannot hold the 6 of the longest prompt and 4 new ones: "
        "use Fixed(size=9) or more, or Growing()."
    )
    with refuses(ConfigError, message):
        generate(gpt2(), [[1], [2] * 6], new_tokens=4, cache=Fixed(size=8))
    # The last token is never read, and a ring needs no more room than its window.
    generate(gpt2(), [[1], [2] * 6], new_tokens=4, cache=Fixed(size=9))
    generate(zoo.small(zoo.DECODERS["window"]), [[2] * 6], new_tokens=9, cache=Fixed(size=8))


def test_an_encoder_decoder_must_be_told_where_to_start() -> None:
    model = zoo.small(zoo.SEQ2SEQS["t5"])
    message = "the model does not say which token its texts start from: give start_id."
    with refuses(InputError, message):
        generate(model, [[1, 2]], new_tokens=3)
    assert len(generate(model, [[1, 2]], new_tokens=3, start_id=0)[0].ids) == 3
    with refuses(
        InputError, "start_id=0 and a decoder goes on from its prompt: leave start_id out."
    ):
        generate(gpt2(), [[1]], new_tokens=3, start_id=0)


def test_another_start_is_another_text() -> None:
    ours = pair("t5")[1]
    texts = {generate(ours, [[5, 6]], new_tokens=8, start_id=one)[0].ids for one in range(6)}
    assert len(texts) > 1


def test_forbidden_words_of_several_tokens_are_not_passed_over_in_silence() -> None:
    model = build(zoo.DECODERS["llama"], seed=0)
    model.described = {"bad_words_ids": [[1], [2, 3]]}
    with pytest.raises(ManyheadsError, match=r"^bad_words_ids of this model holds words"):
        generate(model, [[1]])
    generate(model, [[1]], new_tokens=1, never=())
