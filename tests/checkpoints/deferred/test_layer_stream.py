"""Layers read from disk one after another are those of the loaded model, and few at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.checkpoints.deferred.layer_stream import LayerStream
from manyheads.checkpoints.folder import load, save
from manyheads.errors import InputError, NonFiniteWarning
from manyheads.models.build import build
from manyheads.models.stack import Stack
from tests.messages import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build("gpt2", layers=3, width=16, heads=2, vocabulary=20, seed=0)
    return save(model, tmp_path_factory.mktemp("stream")).folder


def present(stack: Stack) -> dict[int, bool]:
    """Whether the weights of each layer are in memory."""
    return {
        index: not any(weight.is_meta for weight in layer.parameters())
        for index, layer in enumerate(stack.layers)
    }


def test_one_layer_at_a_time_has_weights_and_they_are_those_of_the_file(folder: Path) -> None:
    stream, whole = LayerStream(folder), load(folder)
    [stack], [expected] = stream.model.stacks().values(), whole.stacks().values()
    assert not any(present(stack).values())
    for index in stream.layers(stack):
        assert present(stack) == {layer: layer == index for layer in range(3)}
        weights = stack.layers[index].state_dict()
        for name, weight in expected.layers[index].state_dict().items():
            assert torch.equal(weights[name], weight)
    assert not any(present(stack).values())


def test_an_interrupted_pass_leaves_no_layer_in_memory(folder: Path) -> None:
    stream = LayerStream(folder)
    [stack] = stream.model.stacks().values()
    layers: Any = stream.layers(stack)
    next(layers)
    layers.close()
    assert not any(present(stack).values())


def test_weights_that_are_not_finite_are_named_when_their_layer_is_read(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=20, seed=0)
    with torch.no_grad():
        model.stack.layers[0].attention.output.weight[0, 0] = torch.nan
    stream = LayerStream(save(model, tmp_path).folder)
    with pytest.warns(NonFiniteWarning, match="attn.c_proj"):
        list(stream.layers(stream.model.stack))


def test_what_cannot_be_streamed_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with refuses(InputError, "model.gguf", "manyheads convert"):
        LayerStream(tmp_path / "model.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "xlnet"}')
    with refuses(InputError, "xlnet", "gpt2"):
        LayerStream(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with refuses(InputError, "model.safetensors", "weights"):
        LayerStream(tmp_path)
