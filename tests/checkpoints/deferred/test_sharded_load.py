"""Sharded by FSDP a model gives what the whole one gives, and no process reads all of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads import lens
from manyheads.checkpoints.deferred import sharded_load
from manyheads.checkpoints.files import WeightFiles
from manyheads.checkpoints.folder import load, save
from manyheads.errors import InputError
from manyheads.models.build import Model, build
from tests.processes import in_processes

SMALL: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 41, "seed": 0}
IDS = [torch.arange(100) % 41, torch.tensor([3, 1, 4, 1, 5])]


def models() -> dict[str, Model]:
    """Transposed weights; a fused projection of one tensor; one of several tensors."""
    return {
        "gpt2": build("gpt2", positions=128, **SMALL),
        "modernbert": build("modernbert-base", hidden=24, **SMALL),
        "llama": build("llama-1b-shape", hidden=24, kv_heads=1, **SMALL),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("sharded")
    return {name: save(model, place / name).folder for name, model in models().items()}


def logits(model: Model) -> list[Tensor]:
    with torch.no_grad():
        return [model(ids[None]).logits for ids in IDS]


def check(folders: dict[str, Path], read: list[int]) -> None:
    for name, folder in folders.items():
        whole = load(folder)
        stored, layers = (sum(map(nbytes, weights)) for weights in weights_of(whole))
        read.clear()
        model = sharded_load.load_sharded(folder)
        # The weights outside of layers, and half of the others.
        assert sum(read) < 1.1 * (stored - layers / 2), name
        local = [sharded_load.local(weight) for weight in weights_of(model)[1]]
        assert sum(map(nbytes, local)) < 0.55 * layers, name
        if name == "llama":
            # First, as it computes in inference mode.
            check_statistics(model, whole)
        for mine, other in zip(logits(model), logits(whole), strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def check_statistics(model: Model, whole: Model) -> None:
    """Of a model whose weights are shared, on texts that are shared too."""
    expected = lens.statistics(whole, IDS, progress=False)
    result = lens.statistics(model, IDS, progress=False, context_parallel=True)
    for measure in expected.names:
        means = pytest.approx(expected.means[measure], abs=1e-4, nan_ok=True)
        assert result.means[measure] == means, measure


def weights_of(model: Model) -> tuple[list[Tensor], list[Tensor]]:
    """All weights, and those of layers."""
    layers = sharded_load.model_layers(model)
    return list(model.parameters()), [weight for layer in layers for weight in layer.parameters()]


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def test_two_processes_give_what_one_does_and_read_their_rows_alone(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counted(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            tensor = method(*arguments)
            read.append(nbytes(tensor))
            return tensor

        return call

    monkeypatch.setattr(WeightFiles, "rows", counted(WeightFiles.rows))
    monkeypatch.setattr(WeightFiles, "__getitem__", counted(WeightFiles.__getitem__))
    assert in_processes(2, lambda: check(folders, read))


def test_without_processes_it_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="torchrun"):
        sharded_load.load_sharded(folders["gpt2"])
