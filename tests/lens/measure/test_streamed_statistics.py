"""Statistics layer by layer from disk are exactly those of the loaded model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.checkpoints.deferred.layer_stream import LayerStream
from manyheads.checkpoints.folder import load, save
from manyheads.errors import InputError
from manyheads.lens.measure import streamed_statistics
from manyheads.lens.measure.statistics import Statistics
from manyheads.models.build import build
from tests.messages import refuses

TEXTS = [[5, 6, 7, 5, 6, 7, 9], [8, 9], [3, 3, 3, 4], [5, 6, 7, 5, 6, 7, 2]]
SIZE: dict[str, Any] = {"layers": 3, "width": 32, "heads": 4, "vocabulary": 50, "seed": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama-1b-shape", {"kv_heads": 2, "hidden": 48}),
    "bert": ("bert-base", {}),
    "modernbert": ("modernbert-base", {}),
}


def folder_of(name: str, place: Path) -> Path:
    config, changes = MODELS[name]
    return save(build(config, **SIZE, **changes), place / name).folder


def assert_equal(one: Statistics, other: Statistics) -> None:
    assert one.names == other.names
    assert one.metadata == other.metadata
    for name in one.names:
        np.testing.assert_array_equal(one.means[name], other.means[name])
        np.testing.assert_array_equal(one.errors[name], other.errors[name])


@pytest.mark.parametrize("name", MODELS)
def test_they_equal_those_of_the_whole_model(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    expected = lens.statistics(load(folder), TEXTS, offsets=(-2,), batch_tokens=8)
    assert_equal(
        lens.statistics_from_folder(folder, TEXTS, offsets=(-2,), batch_tokens=8), expected
    )


def test_groups_of_texts_read_the_layers_again_and_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of("gpt2", tmp_path)
    monkeypatch.setattr(streamed_statistics, "MAX_WAITING_BYTES", 1)
    grouped = lens.statistics_from_folder(folder, iter(TEXTS), batch_tokens=8)
    assert_equal(grouped, lens.statistics(load(folder), TEXTS, batch_tokens=8))


def test_ctrl_c_keeps_the_finished_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = LayerStream(folder_of("gpt2", tmp_path))
    monkeypatch.setattr(streamed_statistics, "MAX_WAITING_BYTES", 1)
    passes = iter([True, False, False])

    def layers(stack: Any) -> Any:
        if not next(passes):
            raise KeyboardInterrupt
        return LayerStream.layers(stream, stack)

    monkeypatch.setattr(stream, "layers", layers)
    partial = lens.statistics_from_folder(stream, TEXTS[:3], batch_tokens=1)
    assert not partial.complete
    assert partial.metadata["texts"] == 1
    with pytest.raises(KeyboardInterrupt):
        lens.statistics_from_folder(stream, TEXTS, batch_tokens=1)


def test_models_with_several_stacks_are_refused(tmp_path: Path) -> None:
    model = build("transformer-base", layers=1, width=16, heads=2, vocabulary=50)
    folder = save(model, tmp_path).folder
    with refuses(InputError, "Seq2Seq", "lens.statistics"):
        lens.statistics_from_folder(folder, [([3, 4], [5, 6])])
