"""Texts: stop strings wherever tokens fall, and streams of whole letters that make up the text."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads import BeamSearch, Generation, Sample, generate, stream
from manyheads.decoding.stopping import (
    REPLACEMENT_CHARACTER,
    StreamDecoder,
    decode_after,
    decoding_context,
)
from manyheads.errors import ConfigError, InputError
from tests.decoding.peers import pair
from tests.decoding.scripted import END, by_bytes, by_words, says
from tests.messages import refuses

WORDS = by_words("▁The", "▁capital", "▁is", "▁Paris", ".", "▁So")
BYTES = by_bytes()
TEXT = "naïve 東京 🎈 END of it"


def drained(pieces: Generator[str, None, Generation]) -> tuple[list[str], Generation]:
    result = []
    while True:
        try:
            result.append(next(pieces))
        except StopIteration as end:
            return result, end.value


@given(text=st.text(max_size=30))
def test_pieces_are_whole_letters_and_make_up_the_text(text: str) -> None:
    ids = BYTES.encode(text).ids
    reader = StreamDecoder(BYTES, [])
    pieces = [reader.push(token) for token in ids]
    assert (
        all(REPLACEMENT_CHARACTER not in piece for piece in pieces) or REPLACEMENT_CHARACTER in text
    )
    assert "".join(pieces) + reader.finish() == text == decode_after(BYTES, [], ids)


@given(
    ids=st.lists(st.integers(0, 255), max_size=20),
    context=st.lists(st.integers(0, 255), max_size=9),
)
def test_broken_bytes_are_read_as_the_tokenizer_reads_them(
    ids: list[int], context: list[int]
) -> None:
    before = decoding_context(BYTES, context)
    reader = StreamDecoder(BYTES, before)
    pieces = [reader.push(token) for token in ids]
    assert "".join(pieces) + reader.finish() == decode_after(BYTES, before, ids)


@given(
    text=st.text(alphabet="ab é", max_size=25),
    stops=st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_handed_out(text: str, stops: list[str]) -> None:
    reader = StreamDecoder(BYTES, [], stops)
    pieces = []
    for token in BYTES.encode(text).ids:
        pieces.append(reader.push(token))
        if reader.stopped:
            break
    pieces.append(reader.finish())
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    # Where one stop string begins within another, the one that is whole first has stopped it.
    if first is None:
        assert "".join(pieces) == text
    else:
        assert reader.stopped
        said = "".join(pieces)
        assert text.startswith(said)
        assert any(text[len(said) :].startswith(stop) for stop in stops)
        assert not any(stop in said for stop in stops)


def test_the_space_before_the_first_new_word_is_kept() -> None:
    prompt, new = WORDS.encode("The capital is").ids, WORDS.encode("Paris").ids
    context = decoding_context(WORDS, prompt)
    assert decode_after(WORDS, context, new) == " Paris"
    reader = StreamDecoder(WORDS, context)
    assert [reader.push(token) for token in [*new, 5, 6]] == [" Paris", ".", " So"]
    assert decode_after(WORDS, [], new) == "Paris"


def test_a_stream_is_the_text_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, TEXT)
    written = generate(model, "Say:", max_new_tokens=60)
    assert (written.text, written.finish_reason) == (TEXT, "eos")
    pieces, streamed = drained(stream(model, "Say:", max_new_tokens=60))
    assert "".join(pieces) == TEXT
    assert all(pieces)
    assert pieces[:4] == ["n", "a", "ï", "v"]
    assert streamed == written


@pytest.mark.parametrize("sampling", [Sample(temperature=3.0), Sample(top_k=9)])
def test_a_stream_of_a_real_model_is_the_text_of_generate(sampling: Sample) -> None:
    model: Any = pair("gpt2")[1]
    model.tokenizer = by_words(*[f"▁w{index}" for index in range(60)])
    try:
        options: dict[str, Any] = {
            "sampling": sampling,
            "seed": 4,
            "max_new_tokens": 20,
            "logprobs": True,
        }
        [written] = generate(model, [[5, 6]], **options)
        pieces, streamed = drained(stream(model, [5, 6], **options))
        assert "".join(pieces) == written.text
        assert streamed == written
    finally:
        model.tokenizer = None


def test_stop_strings_end_a_text_before_them_across_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, TEXT, "nothing to END", "never")
    written = generate(model, ["a", "b", "c"], max_new_tokens=60, stop_strings=["END", "zzz"])
    assert [each.text for each in written] == ["naïve 東京 🎈 ", "nothing to ", "never"]
    assert [each.finish_reason for each in written] == ["stop string", "stop string", "eos"]
    # The tokens that made up the string were chosen all the same.
    assert BYTES.decode(list(written[1].ids)) == "nothing to END"
    pieces, _ = drained(stream(says(monkeypatch, TEXT), "a", max_new_tokens=60, stop_strings="END"))
    assert "".join(pieces) == "naïve 東京 🎈 "


def test_the_beginning_of_a_stop_string_is_part_of_the_text_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = says(monkeypatch, "it is EN")
    assert generate(model, "a", max_new_tokens=8, stop_strings="END").text == "it is EN"
    assert "".join(stream(model, "a", max_new_tokens=8, stop_strings="END")) == "it is EN"


def test_a_special_token_named_as_a_string_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "enough")
    written = generate(model, "a", max_new_tokens=20, stop_strings=END, eos_token_ids=())
    assert (written.text, written.finish_reason) == ("enough", "eos")


def test_a_letter_cut_by_the_length_is_shown_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "東京")
    assert generate(model, "a", max_new_tokens=4).text == "東" + REPLACEMENT_CHARACTER
    assert "".join(stream(model, "a", max_new_tokens=4)) == "東" + REPLACEMENT_CHARACTER


def test_a_tokenizer_that_cuts_and_pads_does_neither_to_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = says(monkeypatch, "x", "y")
    model.tokenizer.enable_truncation(3)
    model.tokenizer.enable_padding()
    prompts = ["a long prompt", "short"]
    from manyheads.decoding.generation_config import GenerationDefaults
    from manyheads.decoding.request import read_prompts

    assert [len(ids) for ids in read_prompts(model, prompts, GenerationDefaults())] == [13, 5]
    assert model.tokenizer.truncation is not None


def test_texts_without_a_tokenizer_are_refused() -> None:
    ours = pair("gpt2")[1]
    remedy = "load a folder with a tokenizer.json, set model.tokenizer, or give token ids."
    for what, ask in (
        ("a text prompt", lambda: generate(ours, "Hello")),
        ("a stop string", lambda: generate(ours, [[1]], stop_strings="end", max_new_tokens=4)),
        ("stream", lambda: stream(ours, [1], max_new_tokens=4)),
    ):
        with refuses(InputError, f"{what} needs a tokenizer and this model has none: {remedy}"):
            ask()


def test_beams_are_not_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "x")
    with pytest.raises(ConfigError, match=r"BeamSearch .*: use generate, or sampling=Greedy\(\)"):
        stream(model, "a", sampling=BeamSearch())


def test_the_text_is_none_without_a_tokenizer() -> None:
    [written] = generate(pair("gpt2")[1], [[1]], max_new_tokens=2)
    assert written.text is None
    assert str(written) == " ".join(map(str, written.ids))
