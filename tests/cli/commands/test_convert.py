"""manyheads convert as a person at a terminal meets it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from manyheads import build, load, save
from manyheads.cli.main import main
from manyheads.quantization import quality


def small(folder: Path) -> Path:
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0), folder)
    return folder


def test_a_folder_is_rewritten_bit_by_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small(tmp_path / "one")
    assert main(["convert", str(source), "-o", str(tmp_path / "two")]) == 0
    assert "as gpt2, which transformers can open" in capsys.readouterr().out
    for file in source.iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_the_folder_may_follow_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, two, three = small(tmp_path / "one"), tmp_path / "two", tmp_path / "three"
    assert main(["convert", str(source), str(two)]) == 0
    assert (two / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert main(["convert", str(source)]) == 2
    assert "needs a folder to write" in capsys.readouterr().err
    assert main(["convert", str(source), str(three), "-o", str(three)]) == 2
    assert not three.exists()


def test_the_type_can_be_changed(tmp_path: Path) -> None:
    source = small(tmp_path / "one")
    assert main(["convert", str(source), "-o", str(tmp_path / "two"), "--dtype", "bfloat16"]) == 0
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "two" / "model.safetensors").values()}
    assert kinds == {torch.bfloat16}


def test_our_own_layout_is_named_as_one_that_only_we_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(build("tiny-encoder", seed=0), tmp_path / "one")
    assert main(["convert", str(tmp_path / "one"), "-o", str(tmp_path / "two")]) == 0
    assert "which only manyheads can open" in capsys.readouterr().out


def test_a_wrong_folder_is_one_line_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "nowhere"), "-o", str(tmp_path / "two")]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "two").exists()


def test_a_model_of_another_type_is_not_written_over_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small(tmp_path / "one")
    before = (source / "model.safetensors").read_bytes()
    for folder in (source, source / ".." / "one"):
        assert main(["convert", str(source), str(folder), "--dtype", "bfloat16"]) == 2
        printed = capsys.readouterr().err
        assert f"{folder} would overwrite the model itself" in printed
        assert printed.endswith("name another folder.\n")
    assert (source / "model.safetensors").read_bytes() == before


def test_a_model_may_be_written_over_itself(tmp_path: Path) -> None:
    source = small(tmp_path / "one")
    before = load(source).state_dict()
    assert main(["convert", str(source), "-o", str(source)]) == 0
    after = load(source).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_rounded_weights_are_saved_with_what_they_cost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "built_in_texts", lambda _: ["Bees tell where flowers are."])
    small = tmp_path / "small"
    assert main(["convert", "house-gpt", str(small), "--weights", "int8"]) == 0
    printed = capsys.readouterr().out
    assert "our own layout" in printed
    assert "perplexity" in printed
    assert "MB instead of 17" in printed
    assert (small / "model.safetensors").stat().st_size < 4.4e6
    assert main(["convert", "house-gpt", "-o", str(tmp_path / "x.onnx"), "--weights", "int8"]) == 2
    assert "--int8" in capsys.readouterr().err


def test_rounded_weights_are_computed_on_the_cpu_in_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = ["--weights", "int8", "--dtype", "bfloat16"]
    assert main(["convert", "house-gpt", str(tmp_path / "small"), *half]) == 2
    assert "leave out --dtype bfloat16" in capsys.readouterr().err
