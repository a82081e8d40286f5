"""Folders are written whole or not at all, and read without trust."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from manyheads.atomic_write import write_tensors
from manyheads.checkpoints.files import (
    INDEX,
    WEIGHTS,
    WeightFiles,
    read_json,
    write_folder,
)
from manyheads.errors import InputError


def write(text: str) -> Callable[[Path], int]:
    return lambda file: file.write_text(text)


def fail(file: Path) -> None:
    file.write_text("half")
    raise OSError(28, "No space left on device")


def test_a_new_folder_holds_the_files_and_nothing_else(tmp_path: Path) -> None:
    write_folder(tmp_path / "deep" / "model", {"a": write("1"), "b": write("2")})
    assert {file.name: file.read_text() for file in (tmp_path / "deep" / "model").iterdir()} == {
        "a": "1",
        "b": "2",
    }
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["model"]


def test_other_files_of_an_old_folder_are_carried_over(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "notes").mkdir(parents=True)
    (model / "notes" / "mine.txt").write_text("keep")
    (model / "a").write_text("old")
    write_folder(model, {"a": write("new")})
    assert (model / "a").read_text() == "new"
    assert (model / "notes" / "mine.txt").read_text() == "keep"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_file_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for text in ("old", "new"):
        write_folder(tmp_path / "model", {"inner/a": write(text), "b": write("2")})
        assert (tmp_path / "model" / "inner" / "a").read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_the_old_folder_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_folder(model, {"a": write("old"), "b": write("old")})
    with pytest.raises(OSError, match="No space left"):
        write_folder(model, {"a": write("new"), "b": fail})
    assert (model / "a").read_text() == "old"
    assert (model / "b").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_names_the_folder_even_inside_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    model = tmp_path / "model"
    with pytest.raises(OSError, match="No space left on device, and nothing there") as caught:
        write_folder(model, {WEIGHTS: lambda file: write_tensors({}, file)})
    assert (caught.value.errno, caught.value.filename) == (28, str(model))
    assert not list(tmp_path.iterdir())


def test_new_weights_leave_no_older_ones_in_several_files(tmp_path: Path) -> None:
    shards = ["model-1.safetensors", "model-2.safetensors"]
    index = json.dumps({"weight_map": dict(zip("ab", shards, strict=True)) | {"c": "../mine"}})
    (tmp_path / "mine").write_text("keep")
    write_folder(tmp_path / "model", {INDEX: write(index), **dict.fromkeys(shards, write("old"))})
    write_folder(tmp_path / "model", {"config.json": write("{}")})
    assert (tmp_path / "model" / shards[0]).exists()
    write_folder(tmp_path / "model", {WEIGHTS: write("new")})
    assert sorted(each.name for each in (tmp_path / "model").iterdir()) == ["config.json", WEIGHTS]
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_link_to_a_folder_stays_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", {"a": write("old")})
    (tmp_path / "link").symlink_to(tmp_path / "model")
    write_folder(tmp_path / "link", {"a": write("new")})
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "model" / "a").read_text() == "new"


@pytest.mark.parametrize("said", [[1], {"a": 3}, None])
def test_an_index_that_names_no_files_is_refused(tmp_path: Path, said: object) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": said}))
    with pytest.raises(InputError, match="has no weight_map from tensors to files"):
        WeightFiles(tmp_path)


def test_weights_of_a_quantized_model_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"a.weight": torch.ones(2, dtype=torch.int8)}, tmp_path / WEIGHTS)
    with pytest.raises(InputError, match=r"a\.weight as I8"):
        WeightFiles(tmp_path)["a.weight"]


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(InputError, match="is a file: give a folder"):
        write_folder(tmp_path / "model", {"a": write("1")})


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    first, second = torch.randn(2, 3), torch.randn(4)
    save_file({"x": first}, tmp_path / "one.safetensors")
    save_file({"y": second}, tmp_path / "two.safetensors")
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with WeightFiles(tmp_path) as weights:
        assert weights.shapes() == {"x": (2, 3), "y": (4,)}
        assert torch.equal(weights["x"], first)
        assert torch.equal(weights["y"], second)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": "one.safetensors"}}))
    with pytest.raises(InputError, match=r"lists one\.safetensors, which does not exist"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 40, -3])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    save_file({"x": torch.randn(20)}, tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).write_bytes((tmp_path / WEIGHTS).read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors is truncated or damaged"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt", "last.ckpt"])
def test_pickles_are_never_read_and_the_way_out_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04would run")
    with pytest.raises(InputError, match=r"in a pickle.*weights_only=True"):
        WeightFiles(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("[1]", "got a list"), (None, "there is no")]
)
def test_broken_json_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=reason):
        read_json(tmp_path / "config.json")
