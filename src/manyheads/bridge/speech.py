"""Recordings as inputs of a wrapped Whisper: spectrograms, with the text that the model hears."""

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.progress import Progress

RATE, SECONDS = 16_000, 30
NO_TIMESTAMPS = "<|notimestamps|>"
# Values of a sample of so many bytes, and their middle.
SAMPLES: dict[int, tuple[Any, int]] = {1: (np.uint8, 128), 2: ("<i2", 0), 4: ("<i4", 0)}


def read_wave(file: Path) -> Float[np.ndarray, " n"]:
    """The samples of a WAV file as one channel of 16,000 per second."""
    if not file.is_file():
        raise InputError(f"there is no file {file}", "give a .wav file")
    try:
        with wave.open(str(file)) as opened:
            size, channels = opened.getsampwidth(), opened.getnchannels()
            rate, data = opened.getframerate(), opened.readframes(opened.getnframes())
    except (wave.Error, EOFError) as error:
        raise InputError(f"{file} cannot be read ({error})", "give a .wav file in PCM") from None
    if size not in SAMPLES or not data:
        raise InputError(
            f"{file} has {len(data):,} bytes of samples of {8 * size} bits",
            "give a .wav file of 8, 16 or 32 bits",
        )
    kind, middle = SAMPLES[size]
    values = (np.frombuffer(data, kind).astype(np.float64) - middle) / 2 ** (8 * size - 1)
    return _resampled(values.reshape(-1, channels).mean(1), rate)


def _resampled(values: Float[np.ndarray, " n"], rate: int) -> Float[np.ndarray, " m"]:
    """The same sound at 16,000 samples per second: its spectrum, cut or filled with zeros.

    >>> tone = np.sin(np.arange(800) * 2 * np.pi * 100 / 8000)
    >>> float(np.abs(_resampled(tone, 8000)[::2] - tone).max()) < 1e-9
    True
    """
    count = len(values) * RATE // rate
    return np.fft.irfft(np.fft.rfft(values)[: count // 2 + 1], count) * (count / len(values))


def speech_inputs(
    model: Any, files: Sequence[Path], *, progress: bool = True
) -> list[dict[str, Tensor]]:
    """The inputs of a wrapped Whisper for recordings, in pieces of 30 seconds.

    The text is what the model itself hears, its most likely tokens one by one.
    """
    kind = getattr(getattr(model, "inner", None), "config", None)
    if not isinstance(model, WrappedModel) or getattr(kind, "model_type", "") != "whisper":
        raise InputError(f"{kind_of(model)} does not read sounds", "use a Whisper model")
    import transformers

    extract = transformers.WhisperFeatureExtractor(feature_size=model.inner.config.num_mel_bins)
    step = RATE * SECONDS
    pieces = []
    for file in files:
        samples = read_wave(file)
        pieces += [samples[start : start + step] for start in range(0, len(samples), step)]
    examples = []
    weight = next(model.parameters())
    with Progress("listening", total=len(pieces), unit="pieces", enabled=progress) as bar:
        for piece in pieces:
            features = extract(piece, sampling_rate=RATE, return_tensors="pt")["input_features"]
            features = features[..., : 2 * model.inner.config.max_source_positions].to(weight)
            ids = transcribe(model, features)
            examples.append({"input_features": features, "decoder_input_ids": ids[None]})
            bar.advance()
    return examples


@torch.no_grad()
def transcribe(model: WrappedModel, features: Float[Tensor, "1 m t"]) -> Int[Tensor, " n"]:
    """The tokens that begin a text, and the most likely ones after them, without the end."""
    inner, generation = model.inner, model.generation
    end, first = inner.config.eos_token_id, inner.config.decoder_start_token_id
    plain = None if model.tokenizer is None else model.tokenizer.token_to_id(NO_TIMESTAMPS)
    ids = [first] + ([] if plain is None else [plain])
    begun = len(ids)
    silent, silent_first = (
        [token for token in generation.get(key) or () if token < model.vocabulary]
        for key in ("suppress_tokens", "begin_suppress_tokens")
    )
    memory = inner.model.encoder(features)
    cache, rest = None, ids
    while len(ids) < inner.config.max_target_positions:
        output = inner(
            encoder_outputs=memory,
            decoder_input_ids=torch.tensor([rest], device=features.device),
            past_key_values=cache,
            use_cache=True,
        )
        cache, scores = output.past_key_values, output.logits[0, -1]
        scores[silent] = -torch.inf
        scores[silent_first if len(ids) == begun else []] = -torch.inf
        rest = [int(scores.argmax())]
        if rest == [end]:
            break
        ids += rest
    return torch.tensor(ids, device=features.device)
