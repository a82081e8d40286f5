"""Recordings are read as Whisper needs them."""

import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from manyheads import build, wrap
from manyheads.bridge.speech import RATE, read_wave, speech_inputs
from manyheads.cli.main import main
from manyheads.errors import InputError
from tests.bridge.zoo import tiny


def record(file: Path, values: np.ndarray, rate: int, channels: int = 1) -> Path:
    with wave.open(str(file), "wb") as opened:
        opened.setnchannels(channels)
        opened.setsampwidth(2)
        opened.setframerate(rate)
        opened.writeframes((np.repeat(values, channels) * 32767).astype("<i2").tobytes())
    return file


def tone(rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize(("rate", "channels"), [(RATE, 1), (22050, 2), (8000, 1)])
def test_a_tone_is_the_same_at_every_rate(rate: int, channels: int, tmp_path: Path) -> None:
    values = read_wave(record(tmp_path / "tone.wav", tone(rate), rate, channels))
    assert len(values) == RATE // 2
    assert np.abs(values - tone(RATE))[200:-200].max() < 0.01


def test_long_recordings_are_cut_and_the_model_hears_text_in_each_piece(tmp_path: Path) -> None:
    model = wrap(tiny("whisper"))
    files = [record(tmp_path / f"{n}.wav", tone(8000, n), 8000) for n in (1, 31)]
    examples = speech_inputs(model, files, progress=False)
    assert len(examples) == 3
    for example in examples:
        assert example["input_features"].shape == (1, 16, 32)
        ids = example["decoder_input_ids"][0].tolist()
        assert ids[0] == model.inner.config.decoder_start_token_id
        with torch.no_grad():
            logits = model.inner(**example).logits[0]
        # Every token is the most likely one after those before it.
        assert logits[:-1].argmax(-1).tolist() == ids[1:]


def test_what_is_no_recording_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    for file in ("text.wav", "nothing.wav"):
        with pytest.raises(InputError, match=file):
            read_wave(tmp_path / file)
    with pytest.raises(InputError, match="does not read sounds"):
        speech_inputs(build("tiny-encoder"), [tmp_path / "text.wav"])
    assert main(["inspect", "--audio", "a.wav", "--text", "words"]) == 2
    assert "--audio" in capsys.readouterr().err
