"""Shapes are of the requested size, and cost what their tiles cost."""

import pytest
import torch

from manyheads import build
from manyheads.errors import ConfigError, InputError
from manyheads.models.recipes import modernbert
from manyheads.train import EncoderShape, measure_shape, search_shapes
from manyheads.train import shape_search as module
from manyheads.train.shape_search import DEVICES, TiledDevice, device_at_hand, grid_of_shapes

SIZE = 150_000_000
BASE = EncoderShape(22, 768, 1152)


def test_parameters_are_those_of_the_model() -> None:
    config = modernbert(width=128, heads=2, hidden=192, layers=3, vocabulary=512)
    shape = EncoderShape(3, 128, 192)
    built = sum(parameter.numel() for parameter in build(config, seed=0).parameters())
    assert built == pytest.approx(shape.parameters(512), rel=0.01)


def test_every_shape_of_the_grid_is_of_the_size_and_in_steps_of_64() -> None:
    shapes = grid_of_shapes(SIZE)
    assert len(shapes) > 100
    assert len(set(shapes)) == len(shapes)
    for shape in shapes:
        assert shape.width % 64 == shape.hidden % 64 == 0
        assert abs(shape.parameters() / SIZE - 1) <= 0.03
    assert BASE in grid_of_shapes(SIZE, layers=22)
    assert {shape.layers for shape in grid_of_shapes(SIZE, layers=22)} == {22}


def test_a_matrix_that_just_overflows_its_tiles_costs_another_wave() -> None:
    device = TiledDevice(multiprocessors=4, operations=1e12, bandwidth=1e18)
    # Of the four matrices 3 and 1 tiles of attention, then 4 or 5 and 1 of the feed-forward.
    full, over = EncoderShape(1, 256, 512), EncoderShape(1, 256, 576)
    times = [shape.seconds(device, tokens=128, length=1) for shape in (full, over)]
    tile = 2 * 128 * 256 / 0.25e12
    assert times[0] == pytest.approx(tile * (256 + 256 + 256 + 512), rel=1e-3)
    assert times[1] == pytest.approx(tile * (256 + 256 + 2 * 256 + 576), rel=1e-3)
    assert over.idle(device, tokens=128) > full.idle(device, tokens=128)


def test_nothing_is_idle_where_tiles_fill_all_multiprocessors() -> None:
    device = TiledDevice(multiprocessors=2, operations=1e12, bandwidth=1e12)
    assert EncoderShape(1, 256, 256).idle(device, tokens=256) == pytest.approx(0.0)


def test_ranking_puts_the_least_mean_slowness_first() -> None:
    ranked = search_shapes(SIZE, ["h200", "t4"], layers=22)
    assert [row.slowness for row in ranked] == sorted(row.slowness for row in ranked)
    assert ranked[0].slowness >= 1
    costs = {
        name: [row.predicted[name] / row.shape.layer_weights for row in ranked]
        for name in ("h200", "t4")
    }
    for index, row in enumerate(ranked):
        ratios = [values[index] / min(values) for values in costs.values()]
        assert row.slowness == pytest.approx(sum(ratios) / 2)


def test_wrong_values_are_named() -> None:
    with pytest.raises(InputError, match=r"'h300'.*h200"):
        search_shapes(SIZE, ["h300"])
    with pytest.raises(InputError, match="devices is empty"):
        search_shapes(SIZE, [])
    with pytest.raises(ConfigError, match="no shape has about 1,000 parameters"):
        search_shapes(1000)
    with pytest.raises(InputError, match="layers must be at least 1"):
        search_shapes(SIZE, layers=0)


def test_time_grows_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.0)
    clock = iter(range(1000))
    monkeypatch.setattr(module, "_now", lambda _: float(next(clock)))
    options = {"tokens": 32, "length": 8}
    assert measure_shape(EncoderShape(2, 64, 64), "cpu", **options) == 1.0
    assert measure_shape(EncoderShape(5, 64, 64), "cpu", **options) == 2.5


@pytest.mark.parametrize(
    ("title", "name"),
    [("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA GeForce RTX 4090", "rtx4090"), ("K80", None)],
)
def test_a_gpu_is_known_by_its_title(
    title: str, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: title)
    assert device_at_hand("cuda") == name
    assert device_at_hand("cpu") == "cpu"
    assert "cpu" in DEVICES
