"""Heads measured on Ray: the same as in one process, resumed, and with a worker that dies."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens, load, save
from manyheads.cli.main import main
from manyheads.errors import InputError
from manyheads.lens.head_kinds.head_tests import OFFSETS
from manyheads.models.build import build
from manyheads.tasks import ablate_with_ray, statistics_with_ray
from manyheads.tasks.filtering import ray_lens
from tests.messages import refuses

pytestmark = [
    # Ray itself leaves sockets open and uses what is deprecated.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("cluster"),
]
WORKER_UNIT = "a cluster of Ray"

TEXTS = [[1 + (place * step) % 50 for place in range(4 + step)] for step in range(1, 10)]
BATCH = 24


@pytest.fixture(scope="module")
def model() -> Any:
    return build("gpt2", layers=2, width=32, heads=4, vocabulary=60, seed=0).eval()


def assert_same(ours: Any, peer: Any) -> None:
    # A file sorts them.
    assert set(ours.names) == set(peer.names)
    assert ours.blocks == peer.blocks
    for table in ("means", "errors"):
        for name, values in getattr(peer, table).items():
            np.testing.assert_allclose(
                getattr(ours, table)[name], values, atol=1e-5, rtol=1e-4, err_msg=name
            )


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "model"
    save(model, path)
    return path


# Every call with work left starts a process that imports torch: few calls test much each.
def inspect_or_ablate(command: str, folder: Path, state: Path, *more: str) -> tuple[Any, Any]:
    """What a command saves in one process and on Ray."""
    ids = [part for text in TEXTS for part in ("--ids", " ".join(map(str, text)))]
    results = []
    for engine in ([], ["--engine", "ray", "--workers", "1", "--state", str(state)]):
        out = folder.parent / f"{command}.json"
        arguments = [command, str(folder), *ids, "--batch-tokens", str(BATCH), *more]
        assert main([*arguments, *engine, "--json", str(out)]) == 0
        results.append(lens.load(out))
        out.unlink()
    return results[0], results[1]


def test_statistics_are_those_of_one_process_and_resume(
    model: Any, folder: Path, tmp_path: Path
) -> None:
    plain, on_ray = (one.statistics for one in inspect_or_ablate("inspect", folder, tmp_path))
    assert_same(on_ray, plain)
    for name in ("texts", "tokens", "class_fractions", "complete"):
        assert on_ray.metadata[name] == plain.metadata[name]
    for ours, peer in zip(on_ray.activations, plain.activations, strict=True):
        assert (ours.text, ours.position, ours.channel) == (peer.text, peer.position, peer.channel)
    files = sorted(tmp_path.iterdir())
    assert len(files) > 2
    files[1].unlink()
    times = {file.name: file.stat().st_mtime_ns for file in files if file.exists()}
    options: dict[str, Any] = {"offsets": OFFSETS, "batch_tokens": BATCH, "progress": False}
    again = statistics_with_ray(load(folder), TEXTS, workers=1, state=tmp_path, **options)
    assert_same(again, plain)
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in times.items())
    with refuses(InputError, "00000000", "delete"):
        statistics_with_ray(model, TEXTS[1:], workers=1, state=tmp_path, **options)


def test_ablation_is_that_of_one_process(folder: Path, tmp_path: Path) -> None:
    more = ("--replace-with", "resample")
    plain, on_ray = inspect_or_ablate("ablate", folder, tmp_path, *more)
    assert_same(on_ray, plain)
    assert on_ray.metadata["baseline"] == pytest.approx(plain.metadata["baseline"], rel=1e-5)
    # All batches are in the folder: nothing starts.
    assert_same(inspect_or_ablate("ablate", folder, tmp_path, *more)[1], plain)


class DiesOnce:
    """Ends its process at the first batch, as a machine that fails does."""

    def __init__(self, work: Any, mark: Path) -> None:
        self.work, self.mark = work, mark

    def __call__(self, model: Any, batch: Any) -> Any:
        if not self.mark.exists():
            self.mark.touch()
            os._exit(1)
        return self.work(model, batch)


def test_a_worker_that_dies_is_replaced(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, mark = ray_lens.ray_map, tmp_path / "died"

    def with_death(model: Any, sources: Any, work: Any, **options: Any) -> Any:
        return original(model, sources, DiesOnce(work, mark), **options)

    monkeypatch.setattr(ray_lens, "ray_map", with_death)
    options: dict[str, Any] = {"replace_with": "mean", "batch_tokens": BATCH, "progress": False}
    on_ray = ablate_with_ray(model, TEXTS, workers=1, **options)
    assert mark.exists()
    assert_same(on_ray, lens.ablate(model, TEXTS, **options))


def test_what_ray_cannot_do_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--state", "s"], ["--engine", "ray", "--until", "top 1"]):
        assert main(["ablate", str(folder), "--ids", "1 2 3", *more]) == 2
        assert "--engine ray" in capsys.readouterr().err
