"""Texts: stop strings wherever tokens fall, and streams of whole letters that make up the text."""

from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads import Beams, Sample, Written, generate, stream
from manyheads.decoding.reading import BROKEN, Reader, context_of, text_of
from manyheads.errors import ConfigError, InputError
from tests.decoding.peers import pair
from tests.decoding.scripted import END, by_bytes, by_words, says
from tests.messages import refuses

WORDS = by_words("▁The", "▁capital", "▁is", "▁Paris", ".", "▁So")
BYTES = by_bytes()
TEXT = "naïve 東京 🎈 END of it"


def drained(pieces: Generator[str, None, Written]) -> tuple[list[str], Written]:
    found = []
    while True:
        try:
            found.append(next(pieces))
        except StopIteration as end:
            return found, end.value


@given(text=st.text(max_size=30))
def test_pieces_are_whole_letters_and_make_up_the_text(text: str) -> None:
    ids = BYTES.encode(text).ids
    reader = Reader(BYTES, [])
    pieces = [reader.push(token) for token in ids]
    assert all(BROKEN not in piece for piece in pieces) or BROKEN in text
    assert "".join(pieces) + reader.finish() == text == text_of(BYTES, [], ids)


@given(
    ids=st.lists(st.integers(0, 255), max_size=20),
    context=st.lists(st.integers(0, 255), max_size=9),
)
def test_broken_bytes_are_read_as_the_tokenizer_reads_them(
    ids: list[int], context: list[int]
) -> None:
    before = context_of(BYTES, context)
    reader = Reader(BYTES, before)
    pieces = [reader.push(token) for token in ids]
    assert "".join(pieces) + reader.finish() == text_of(BYTES, before, ids)


@given(
    text=st.text(alphabet="ab é", max_size=25),
    stops=st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_handed_out(text: str, stops: list[str]) -> None:
    reader = Reader(BYTES, [], stops)
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
    context = context_of(WORDS, prompt)
    assert text_of(WORDS, context, new) == " Paris"
    reader = Reader(WORDS, context)
    assert [reader.push(token) for token in [*new, 5, 6]] == [" Paris", ".", " So"]
    assert text_of(WORDS, [], new) == "Paris"


def test_a_stream_is_the_text_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, TEXT)
    written = generate(model, "Say:", new_tokens=60)
    assert (written.text, written.stopped_by) == (TEXT, "stop id")
    pieces, streamed = drained(stream(model, "Say:", new_tokens=60))
    assert "".join(pieces) == TEXT
    assert all(pieces)
    assert pieces[:4] == ["n", "a", "ï", "v"]
    assert streamed == written


@pytest.mark.parametrize("choose", [Sample(temperature=3.0), Sample(top_k=9)])
def test_a_stream_of_a_real_model_is_the_text_of_generate(choose: Sample) -> None:
    model: Any = pair("gpt2")[1]
    model.tokenizer = by_words(*[f"▁w{index}" for index in range(60)])
    try:
        wishes: dict[str, Any] = {"choose": choose, "seed": 4, "new_tokens": 20, "logprobs": True}
        [written] = generate(model, [[5, 6]], **wishes)
        pieces, streamed = drained(stream(model, [5, 6], **wishes))
        assert "".join(pieces) == written.text
        assert streamed == written
    finally:
        model.tokenizer = None


def test_stop_strings_end_a_text_before_them_across_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, TEXT, "nothing to END", "never")
    written = generate(model, ["a", "b", "c"], new_tokens=60, stop=["END", "zzz"])
    assert [each.text for each in written] == ["naïve 東京 🎈 ", "nothing to ", "never"]
    assert [each.stopped_by for each in written] == ["stop string", "stop string", "stop id"]
    # The tokens that made up the string were chosen all the same.
    assert BYTES.decode(list(written[1].ids)) == "nothing to END"
    pieces, _ = drained(stream(says(monkeypatch, TEXT), "a", new_tokens=60, stop="END"))
    assert "".join(pieces) == "naïve 東京 🎈 "


def test_what_only_began_a_stop_string_is_given_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "it is EN")
    assert generate(model, "a", new_tokens=8, stop="END").text == "it is EN"
    assert "".join(stream(model, "a", new_tokens=8, stop="END")) == "it is EN"


def test_a_special_token_named_as_a_string_stops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "enough")
    written = generate(model, "a", new_tokens=20, stop=END, stop_ids=())
    assert (written.text, written.stopped_by) == ("enough", "stop id")


def test_a_letter_cut_by_the_length_is_shown_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "東京")
    assert generate(model, "a", new_tokens=4).text == "東" + BROKEN
    assert "".join(stream(model, "a", new_tokens=4)) == "東" + BROKEN


def test_a_tokenizer_that_cuts_and_pads_does_neither_to_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = says(monkeypatch, "x", "y")
    model.tokenizer.enable_truncation(3)
    model.tokenizer.enable_padding()
    prompts = ["a long prompt", "short"]
    from manyheads.decoding.habits import Habits
    from manyheads.decoding.prompts import read_prompts

    assert [len(ids) for ids in read_prompts(model, prompts, Habits())] == [13, 5]
    assert model.tokenizer.truncation is not None


def test_texts_without_a_tokenizer_are_refused() -> None:
    ours = pair("gpt2")[1]
    remedy = "load a folder with a tokenizer.json, set model.tokenizer, or give token ids."
    for what, ask in (
        ("a prompt of text", lambda: generate(ours, "Hello")),
        ("a stop string", lambda: generate(ours, [[1]], stop="end", new_tokens=4)),
        ("a stream of text", lambda: stream(ours, [1], new_tokens=4)),
    ):
        with refuses(InputError, f"{what} needs a tokenizer and this model has none: {remedy}"):
            ask()


def test_beams_are_not_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = says(monkeypatch, "x")
    message = "beams change their mind about a text until it ends: use generate, or Greedy()."
    with refuses(ConfigError, message):
        stream(model, "a", choose=Beams())


def test_without_a_tokenizer_there_is_no_text() -> None:
    [written] = generate(pair("gpt2")[1], [[1]], new_tokens=2)
    assert written.text is None
    assert str(written) == " ".join(map(str, written.ids))
