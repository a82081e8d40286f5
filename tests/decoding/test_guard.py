"""A guard reads each sentence that a decoder writes: what it refuses is stopped or marked."""

from typing import Any

import pytest

from manyheads import BeamSearch, build, classify, generate, stream, with_classes
from manyheads.decoding.guard import Guard, sentence_spans
from manyheads.errors import ConfigError, InputError
from tests.decoding.scripted import by_bytes, says
from tests.encoding.tiny import small
from tests.messages import refuses

SENTENCES = ["the sun.", "a cat sat on the mat!", "zz zzz.", "by the door"]


@pytest.fixture(scope="module")
def case() -> tuple[Any, float, str, list[str]]:
    """A classifier, and a threshold above which it refuses one sentence of four."""
    model = with_classes(small(), ("fine", "toxic"))
    shares = classify(model, SENTENCES).probabilities[:, 1].tolist()
    first, second = sorted(shares, reverse=True)[:2]
    bad = SENTENCES[shares.index(first)]
    good = [sentence for sentence in SENTENCES if sentence != bad]
    return model, (first + second) / 2, bad, good


def test_sentences_are_found_once_they_are_complete() -> None:
    text = "One. Two costs 3.5!\nThree"
    parts = [text[slice(*span)] for span in sentence_spans(text, 0, complete=True)]
    assert "".join(parts) == text
    assert [part.strip() for part in parts if part.strip()] == ["One.", "Two costs 3.5!", "Three"]
    assert list(sentence_spans(text, 20, complete=False)) == []
    long = "word " * 400
    assert all(end - start <= 600 for start, end in sentence_spans(long, 0, complete=True))


def test_a_text_ends_before_what_is_refused(
    case: tuple[Any, float, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, threshold, bad, good = case
    text = f"{good[0]} {bad}\n{good[1]}\n"
    guard = Guard(model, refuse="toxic", threshold=threshold)
    whole = f"{good[0]}\n{good[1]}\n"
    stopped, passed = generate(says(monkeypatch, text, whole), ["x", "x"], guard=guard)
    assert stopped.text == good[0]
    assert stopped.finish_reason == "guard"
    assert (passed.text, passed.finish_reason) == (whole, "eos")
    assert stopped.guard is not None
    [refused] = stopped.guard.refused
    assert (refused.sentence, refused.text, refused.label) == (2, bad, "toxic")
    assert text[refused.start : refused.end].strip() == bad
    expected = classify(model, bad).probabilities[0, 1]
    assert refused.probability == pytest.approx(float(expected), abs=1e-6)
    assert 0 < stopped.guard.fraction < 1
    assert passed.guard is not None
    assert (passed.guard.refused, passed.guard.sentences) == ((), 2)


@pytest.mark.parametrize("end", [True, False])
def test_a_stream_never_shows_what_is_refused(
    case: tuple[Any, float, str, list[str]], monkeypatch: pytest.MonkeyPatch, end: bool
) -> None:
    model, threshold, bad, good = case
    # The refused sentence is the last, at the model's own end or at the limit of tokens.
    text = f"{good[0]}\n{bad.rstrip('.!')}"
    guard = Guard(model, refuse=f"probability['toxic'] > {threshold - 1}")
    assert list(stream(says(monkeypatch, text), "x", guard=guard)) == []
    guard = Guard(model, refuse=f"tokens == {len(bad.rstrip('.!')) + 2}")
    pieces = list(
        stream(says(monkeypatch, text, end=end), "x", guard=guard, max_new_tokens=len(text) + end)
    )
    assert "".join(pieces) == f"{good[0]}\n"


def test_marks_leave_the_text_as_it_is(
    case: tuple[Any, float, str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, threshold, bad, good = case
    text = f"{bad}\n{good[0]}\n{bad}\n"
    guard = Guard(model, refuse="toxic", threshold=threshold, action="mark")
    generation = generate(says(monkeypatch, text), "x", guard=guard)
    assert (generation.text, generation.finish_reason) == (text, "eos")
    assert generation.guard is not None
    assert [each.sentence for each in generation.guard.refused] == [1, 3]
    pieces = list(stream(says(monkeypatch, text), "x", guard=guard))
    assert "".join(pieces) == text
    assert len(pieces) > len(text) // 2


def test_beams_are_read_in_the_end(case: tuple[Any, float, str, list[str]]) -> None:
    model = build("gpt2", layers=1, width=8, heads=1, vocabulary=257, seed=0)
    model.tokenizer = by_bytes()
    beams = {"sampling": BeamSearch(num_beams=2), "max_new_tokens": 5}
    plain = generate(model, "x", **beams)
    kept = generate(model, "x", **beams, guard=Guard(case[0], refuse="toxic", threshold=1.0))
    assert (kept.text, kept.ids) == (plain.text, plain.ids)
    none = generate(model, "x", **beams, guard=Guard(case[0], refuse="toxic", threshold=0.0))
    assert (none.text, none.finish_reason) == ("", "guard")


def test_what_a_guard_cannot_be(case: tuple[Any, float, str, list[str]]) -> None:
    model = case[0]
    assert Guard(model).rule.text == 'probability["toxic"] >= 0.5'
    with refuses(InputError, "refuse=", "good, bad"):
        Guard(with_classes(small(), ("good", "bad")))
    with refuses(InputError, "refuse='toxc'", "fine, toxic"):
        Guard(model, refuse="toxc")
    with refuses(InputError, "language", "no columns"):
        Guard(model, refuse='language == "en"')
    with refuses(ConfigError, "threshold=0.7", "into the rule"):
        Guard(model, refuse="score > 1", threshold=0.7)
    with refuses(InputError, "neither classifies nor scores"):
        Guard(small())
    decoder = build("gpt2", layers=1, width=8, heads=1, vocabulary=257, seed=0)
    with refuses(InputError, "a guard needs a tokenizer"):
        generate(decoder, [[1, 2]], guard=model)
