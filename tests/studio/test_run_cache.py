"""A run forms any window of any head's pattern, whatever the layer is made of."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.attention import AttentionConfig
from manyheads.errors import InputError
from manyheads.lens.attention_maps.patterns import patterns
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import Branch
from manyheads.parts.masks import Causal, Window
from manyheads.parts.positions import Alibi
from manyheads.studio.models import LoadedModel, ModelStore
from manyheads.studio.requests import DisconnectedError, RequestBody
from manyheads.studio.run_cache import RunCache, trace_run
from manyheads.taps import Head
from tests.mixers.mixer_configs import BOTH_WAYS, CAUSAL, small_model
from tests.studio import models

TEXT = "The cat sat on the mat and the dog sat on the log"


def changed(**parts: Any) -> Any:
    """The small decoder with other parts in its attention."""
    config = models.decoder(layers=2).config
    assert isinstance(config, DecoderConfig)
    layers = []
    for layer in config.stack.layers:
        assert isinstance(layer.attention, Branch)
        assert isinstance(layer.attention.inner, AttentionConfig)
        branch = replace(layer.attention, inner=replace(layer.attention.inner, **parts))
        layers.append(replace(layer, attention=branch))
    model = build(replace(config, stack=replace(config.stack, layers=tuple(layers))), seed=0)
    for parameter in model.parameters():
        parameter.data.mul_(3.0).add_(0.01)
    model.tokenizer = models.tokenizer()
    return model


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"mask": Window(before=3)},
        {"position": Alibi()},
        {"sink": "learned"},
        {"mask": Causal() & Window(before=5), "position": Alibi()},
    ],
    ids=["rotary", "window", "alibi", "sink", "both"],
)
def test_every_window_is_that_of_the_pattern(parts: dict[str, Any]) -> None:
    model = changed(**parts)
    text = LoadedModel("one", model).read_text(TEXT)
    length = len(text)
    with torch.inference_mode():
        run = trace_run(model, text.inputs)
    for head in (Head(0, 0), Head(1, 3)):
        whole = patterns(model, TEXT, [head]).of(head).weights
        for rows, keys in (
            (range(length), range(length)),
            (range(2, 7), range(1, 5)),
            (range(length - 1, length), range(length)),
            (range(length), range(3, 4)),
        ):
            window = run.weights(head, rows, keys)
            expected = whole[rows.start : rows.stop, keys.start : keys.stop]
            assert torch.allclose(window, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["retention", "delta"])
def test_windows_of_mixers_are_shares_of_their_weights(name: str) -> None:
    model, ids = small_model(CAUSAL[name]), [5, 6, 7, 8, 9, 5, 6]
    with torch.inference_mode():
        run = trace_run(model, read_inputs(model, [ids]))
    whole = patterns(model, [ids], [Head(0, 1)]).of(Head(0, 1)).weights
    window = run.weights(Head(0, 1), range(2, 6), range(1, 5))
    assert torch.allclose(window, whole[2:6, 1:5], atol=1e-5)
    assert run.bytes > 0
    with pytest.raises(InputError, match="no head L1H0"):
        RequestBody({"heads": ["L1H0"]}).heads(model)
    with pytest.raises(InputError, match="no heads: its layers mix tokens by Fourier"):
        ModelStore([("fnet", small_model(BOTH_WAYS["fourier"]))])


def test_whoever_leaves_ends_the_run_at_the_next_layer() -> None:
    model = models.decoder()
    text = LoadedModel("one", model).read_text(TEXT)
    checks = 0

    def cancelled() -> bool:
        nonlocal checks
        checks += 1
        return checks > 4

    with torch.inference_mode(), pytest.raises(DisconnectedError):
        trace_run(model, text.inputs, cancelled=cancelled)
    assert checks == 5


def test_memory_lets_the_longest_unused_go() -> None:
    model, made = models.decoder(layers=1), []
    loaded = LoadedModel("one", model)

    def run(text: str) -> Any:
        def make() -> Any:
            made.append(text)
            with torch.inference_mode():
                return trace_run(model, loaded.read_text(text).inputs)

        return memory.get(text, make)

    memory = RunCache(max_bytes=1)
    first = run("The cat")
    assert run("The cat") is first
    run("The dog")
    run("The cat")
    assert made == ["The cat", "The dog", "The cat"]
    memory = RunCache(max_bytes=10**9)
    for text in ("The cat", "The dog", "The cat", "The dog"):
        run(text)
    assert made[3:] == ["The cat", "The dog"]
    assert memory.used_bytes > 0
