"""A pass over a corpus: its statistics, passages, and going on after a stop."""

import itertools
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.corpus import corpus_pass
from manyheads.lens.corpus.corpus_pass import _ChunkReader, read_corpus
from manyheads.lens.corpus.pass_state import CorpusPass, PassSettings
from manyheads.models.build import Model, build
from manyheads.progress import MeasuredStream, listening

SETTINGS = PassSettings(max_length=16)


@pytest.fixture(scope="module")
def model() -> Model:
    return build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)


def corpus(count: int = 12) -> list[list[int]]:
    draw = np.random.default_rng(0)
    return [draw.integers(3, 50, draw.integers(2, 40)).tolist() for _ in range(count)]


def pieces(texts: list[list[int]], length: int) -> list[list[int]]:
    return [text[at : at + length] for text in texts for at in range(0, len(text), length)]


def same(one: CorpusPass, other: CorpusPass) -> bool:
    """Whether two passes have added up the same."""
    assert (one.texts, one.passages, one.tokens) == (other.texts, other.passages, other.tokens)
    assert one.pool.keys() == other.pool.keys()
    for block, sums in one.sums.blocks.items():
        twin = other.sums.of(block)
        assert np.allclose(sums.earlier, twin.earlier)
        assert (sums.at.ids == twin.at.ids).all()
        assert np.allclose(sums.at.sums, twin.at.sums, atol=1e-5)
        assert (sums.book.histogram == twin.book.histogram).all()
        for head in range(block.heads):
            for mine, its in zip(sums.book.sharpest(head), twin.book.sharpest(head), strict=True):
                assert (mine.text, mine.query, mine.rows) == (its.text, its.query, its.rows)
                assert (mine.keys == its.keys).all()
    return True


def test_statistics_are_those_of_the_passages(model: Model) -> None:
    done, measured = read_corpus(model, corpus(), SETTINGS, progress=False)
    plain = lens.statistics(model, pieces(corpus(), 16), progress=False)
    for name in plain.names:
        assert np.allclose(measured[name].means, plain[name].means, atol=1e-5, equal_nan=True)
        assert np.allclose(measured[name].errors, plain[name].errors, atol=1e-5, equal_nan=True)
    assert done.tokens == sum(map(len, corpus()))
    assert done.complete


def test_a_stopped_pass_goes_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_pass, "TEXTS_PER_CHUNK", 2)
    monkeypatch.setattr(corpus_pass, "SECONDS_BETWEEN_SAVES", 0.0)
    state = tmp_path / "state.safetensors"

    def interrupted() -> Iterator[list[int]]:
        yield from corpus()[:7]
        raise RuntimeError("the power is cut")

    with pytest.raises(RuntimeError):
        read_corpus(model, interrupted(), SETTINGS, state=state, progress=False)
    done, measured = read_corpus(model, iter(corpus()), SETTINGS, state=state, progress=False)
    whole, expected = read_corpus(model, corpus(), SETTINGS, progress=False)
    assert same(done, whole)
    for name in expected.names:
        assert np.allclose(measured[name].means, expected[name].means, equal_nan=True)
    # Once more: nothing is left to read.
    again, _ = read_corpus(model, corpus(), SETTINGS, state=state, progress=False)
    assert same(again, whole)


def test_ctrl_c_while_a_text_is_read_keeps_the_texts_before(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_pass, "TEXTS_PER_CHUNK", 2)

    def interrupted() -> Iterator[list[int]]:
        yield from corpus()[:4]
        signal.raise_signal(signal.SIGINT)
        pytest.fail("reading goes on")

    done, _ = read_corpus(model, interrupted(), SETTINGS, progress=False)
    assert done.texts == 4
    assert not done.complete


@contextmanager
def signals_in_batch(number: int, count: int = 1) -> Iterator[None]:
    """Ctrl-C, pressed in the middle of a batch."""
    run, batches = _ChunkReader._run, itertools.count(1)

    def interrupted(reader: _ChunkReader, *inputs: Any) -> None:
        if next(batches) == number:
            for _ in range(count):
                signal.raise_signal(signal.SIGINT)
        run(reader, *inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ChunkReader, "_run", interrupted)
        yield


def test_ctrl_c_saves_all_batches_up_to_the_current_one(model: Model, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    options: dict[str, Any] = {"state": state, "batch_tokens": 32, "progress": False}
    with signals_in_batch(3):
        stopped, measured = read_corpus(model, corpus(), SETTINGS, **options)
    # All texts are of one chunk, and what was read of it counts.
    assert (stopped.texts, stopped.complete) == (0, False)
    assert measured.metadata["texts"] == stopped.passages_read == len(stopped.ahead) > 3
    changed = [*corpus()[:-1], [4, 5, 6]]
    with pytest.raises(InputError, match="the texts differ"):
        read_corpus(model, changed, SETTINGS, **options)
    with signals_in_batch(1):
        further, _ = read_corpus(model, corpus(), SETTINGS, **options)
    assert stopped.ahead < further.ahead
    done, resumed = read_corpus(model, corpus(), SETTINGS, **options)
    whole, expected = read_corpus(model, corpus(), SETTINGS, progress=False)
    assert done.complete
    assert same(done, whole)
    for name in expected.names:
        assert np.allclose(resumed[name].means, expected[name].means, equal_nan=True, atol=1e-6)


def test_a_second_ctrl_c_stops_at_once_without_saving(model: Model, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt), signals_in_batch(2, count=2):
        read_corpus(model, corpus(), SETTINGS, state=state, batch_tokens=32, progress=False)
    assert not state.exists()


def test_ctrl_c_before_the_first_batch_leaves_no_result(model: Model) -> None:
    def interrupted() -> Iterator[list[int]]:
        signal.raise_signal(signal.SIGINT)
        yield from corpus()

    with pytest.raises(KeyboardInterrupt):
        read_corpus(model, interrupted(), SETTINGS, progress=False)


def test_a_bar_of_a_stream_estimates_its_total(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_pass, "TEXTS_PER_CHUNK", 3)
    totals: list[float | None] = []
    texts = MeasuredStream.over(corpus(), lambda text: text)
    with listening(lambda bar: totals.append(bar.total)):
        read_corpus(model, texts, SETTINGS, progress=False)
    assert totals[0] is None
    assert totals[-1] == 12
    assert set(totals[1:]) == {12}


@pytest.mark.parametrize("content", [b"no file", None], ids=["garbage", "cut short"])
def test_a_damaged_state_is_refused(model: Model, tmp_path: Path, content: bytes | None) -> None:
    state = tmp_path / "state.safetensors"
    read_corpus(model, corpus(3), SETTINGS, state=state, progress=False)
    state.write_bytes(state.read_bytes()[:-9] if content is None else content)
    with pytest.raises(InputError, match="is damaged"):
        read_corpus(model, corpus(3), SETTINGS, state=state, progress=False)


def test_a_corpus_that_has_changed_is_refused(model: Model, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    read_corpus(model, corpus(3), SETTINGS, state=state, progress=False)
    with pytest.raises(InputError, match="the texts differ"):
        read_corpus(model, [[4, 5, 6], *corpus(3)[1:]], SETTINGS, state=state, progress=False)


def test_a_state_of_other_settings_or_weights_is_refused(model: Model, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    read_corpus(model, corpus(3), SETTINGS, state=state, progress=False)
    other = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=1)
    for candidate, settings in ((model, PassSettings(max_length=8)), (other, SETTINGS)):
        with pytest.raises(InputError, match="another model or other settings"):
            read_corpus(candidate, corpus(3), settings, state=state, progress=False)


@pytest.mark.parametrize(
    ("texts", "message"), [([], "there are no texts"), ({"input_ids": [1]}, "got a dict")]
)
def test_what_is_no_corpus_is_refused(model: Model, texts: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_corpus(model, texts, SETTINGS, progress=False)
