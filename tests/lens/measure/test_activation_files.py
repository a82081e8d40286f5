"""Activations on disk: what the files hold, and how they are written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from manyheads import lens
from manyheads.bridge.wrapped_model import wrap
from manyheads.checkpoints.folder import load
from manyheads.cli.main import main
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.bridge.zoo import texts_of, tiny

TEXTS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14], [1, 2, 3, 4]]
SITES = ["L1.before", "L1.after", "L0.z", "L1H2", "L1.attention", "L1.feedforward", "final"]


def read(result: lens.ActivationFiles) -> dict[str, Tensor]:
    parts = [load_file(path) for path in result.shards]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def native() -> Any:
    return build("gpt2", layers=2, width=32, heads=4, vocabulary=50, seed=0).eval()


def test_rows_are_what_a_forward_shows(tmp_path: Path) -> None:
    model = native()
    result = lens.activations(model, TEXTS, SITES, tmp_path / "a", shard_tokens=5, progress=False)
    assert (result.tokens, result.texts, len(result.shards)) == (14, 4, 3)
    rows = read(result)
    expected = {
        "L1.before": Site(1, Tap.BEFORE),
        "L1.after": Site(1, Tap.AFTER, Sublayer.FEEDFORWARD),
        "L0.z": Site(0, Tap.HEAD_OUTPUT),
        "L1.attention": Site(1, Tap.OUTPUT),
        "L1.feedforward": Site(1, Tap.OUTPUT, Sublayer.FEEDFORWARD),
        "final": Site(-1, Tap.FINAL),
    }
    for text, ids in enumerate(TEXTS):
        record = Record([*expected.values(), Site(1, Tap.HEAD_OUTPUT)])
        with torch.no_grad():
            model(torch.tensor([ids]), watch=record)
        mine = rows["text"] == text
        assert rows["token"][mine].tolist() == ids
        assert rows["position"][mine].tolist() == list(range(len(ids)))
        for name, site in expected.items():
            value = record[site]
            assert isinstance(value, Ragged)
            torch.testing.assert_close(
                rows[name][mine], value.values.flatten(1), rtol=1e-4, atol=1e-5
            )
        heads = record[Site(1, Tap.HEAD_OUTPUT)]
        assert isinstance(heads, Ragged)
        torch.testing.assert_close(rows["L1H2"][mine], heads.values[:, 2], rtol=1e-4, atol=1e-5)
    manifest = json.loads((tmp_path / "a" / "activations.json").read_text())
    assert manifest["sites"]["L0.z"] == 32
    assert manifest["files"] == [path.name for path in result.shards]


def test_a_wrapped_model_gives_the_rows_of_the_native_one(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "model")
    models = load(tmp_path / "model"), wrap(tiny("gpt2"))
    one, two = (
        read(lens.activations(model, TEXTS, SITES, tmp_path / str(index), progress=False))
        for index, model in enumerate(models)
    )
    for name, each in one.items():
        torch.testing.assert_close(two[name], each, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_the_parts_of_a_wrapped_layer_sum_to_its_output(name: str, tmp_path: Path) -> None:
    stack, parts = "", ["before", "attention", "feedforward"]
    if name == "t5":
        stack, parts = "decoder.", [*parts, "cross"]
    sites = [f"{stack}L1.{part}" for part in [*parts, "after"]]
    result = lens.activations(
        wrap(tiny(name)), texts_of(name), sites, tmp_path / "a", progress=False
    )
    rows = read(result)
    total = sum((rows[f"{stack}L1.{part}"] for part in parts), torch.zeros(()))
    torch.testing.assert_close(total, rows[f"{stack}L1.after"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit", "whisper"])
def test_what_is_not_text_has_no_tokens(name: str, tmp_path: Path) -> None:
    site = "L0.after" if name == "vit" else "encoder.L0.after"
    rows = read(
        lens.activations(wrap(tiny(name)), texts_of(name), site, tmp_path / "a", progress=False)
    )
    assert set(rows["token"].tolist()) == {-1}
    assert set(rows["text"].tolist()) == {0, 1}


def test_parquet_and_small_numbers(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    options: dict[str, Any] = {"dtype": "float16", "progress": False}
    result = lens.activations(
        native(), TEXTS, Head(0, 1), tmp_path / "a", format="parquet", **options
    )
    table = parquet.read_table(result.shards[0])
    assert table.column_names == ["L0H1", "text", "position", "token"]
    plain = read(lens.activations(native(), TEXTS, "L0H1", tmp_path / "b", **options))
    assert table["L0H1"].to_pylist() == plain["L0H1"].tolist()
    with pytest.raises(InputError, match="bfloat16"):
        lens.activations(
            native(), TEXTS, "L0H1", tmp_path / "c", format="parquet", dtype="bfloat16"
        )


def test_files_are_written_while_texts_are_read(tmp_path: Path) -> None:
    written: list[int] = []

    def texts() -> Iterator[list[int]]:
        for _ in range(1100):
            written.append(len(list(tmp_path.glob("a/*.safetensors"))))
            yield [1, 2, 3, 4]

    result = lens.activations(
        native(), texts(), "L0.z", tmp_path / "a", shard_tokens=800, progress=False
    )
    assert (written[0], written[-1], len(result.shards)) == (0, 5, 6)
    assert [len(load_file(path)["text"]) for path in result.shards] == [800] * 5 + [400]


@pytest.mark.parametrize(
    "site", ["L9.after", "L0H9", "residual", "L0.mlp", "decoder.L0.z", "cross.L0H1", "L1.cross", ""]
)
def test_unknown_sites_are_refused(site: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        lens.activations(native(), TEXTS, site, tmp_path / "a", progress=False)
    assert not (tmp_path / "a").exists()


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        lens.activations(native(), TEXTS, "L0.z", tmp_path, progress=False)
    wrapped = wrap(tiny("t5"))
    with pytest.raises(InputError, match="stacks"):
        lens.activations(wrapped, texts_of("t5"), ["encoder.L0.z", "decoder.L0.z"], tmp_path / "a")
    with pytest.raises(InputError, match="before"):
        lens.activations(wrap(tiny("bert")), TEXTS, "L0.feedforward", tmp_path / "a")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("gpt2").save_pretrained(tmp_path / "model")
    words = ["encode", str(tmp_path / "model"), "--ids", "5 6 7", "--site", "L0.z"]
    assert main([*words, "--site", "L1H1", "-o", str(tmp_path / "acts")]) == 0
    assert "3 tokens of 1 text" in capsys.readouterr().out
    assert (tmp_path / "acts" / "activations-00000.safetensors").exists()
    assert main([*words, "--pooling", "mean", "-o", str(tmp_path / "other")]) != 0
