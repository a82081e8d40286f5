"""Models with integer weights are loaded, saved and loaded again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyheads import build, load, save
from manyheads.errors import InputError
from manyheads.quantization import dequantize_weights, quantize_weights
from manyheads.quantization.integer_codes import round_weight
from manyheads.quantization.model_weights import layouts_of, set_codes, weights_of

IDS = torch.arange(30)[None] * 3 % 90
NAMES: tuple[Any, ...] = ("int8", "int4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 90}
    model = build("llama-1b-shape", **shape, seed=0).eval()
    return save(model, tmp_path_factory.mktemp("models") / "llama").folder


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_gives_the_same_bits_when_it_is_loaded(
    name: Any, folder: Path, tmp_path: Path
) -> None:
    model = load(folder, weights=name)
    saved = save(model, tmp_path / name)
    again = load(saved.folder)
    assert weights_of(model) == weights_of(again) == name
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    sizes = [(path / "model.safetensors").stat().st_size for path in (folder, saved.folder)]
    assert sizes[1] < 0.3 * sizes[0]
    assert weights_of(load(saved.folder, weights=name)) == name


def test_a_folder_with_four_bits_in_every_linear_layer_opens(folder: Path, tmp_path: Path) -> None:
    """As those that were saved when feed-forwards contracted in four bits too."""
    model = load(folder, weights="int4")
    plain = load(folder)
    for name, layout in layouts_of(model).items():
        if name.endswith("contract"):
            assert layout == "int8"
            set_codes(model, name, round_weight(plain.get_submodule(name).weight, "int4"))
    saved = save(model, tmp_path / "four")
    config = json.loads((saved.folder / "config.json").read_text())
    assert config["integer_weights"] == "int4"
    with torch.no_grad():
        assert torch.equal(load(saved.folder)(IDS).logits, model(IDS).logits)


def test_a_dequantized_model_is_saved_as_its_family(folder: Path, tmp_path: Path) -> None:
    model = load(folder, weights="int8")
    save(model, tmp_path / "small")
    again = load(tmp_path / "small")
    dequantize_weights(again)
    save(again, tmp_path / "plain")
    plain = load(tmp_path / "plain")
    assert weights_of(plain) is None
    weight = plain.stack.layers[0].attention.project.weight
    assert torch.equal(weight, model.stack.layers[0].attention.project.weight)


def test_half_precision_is_refused_beside_integer_weights(folder: Path) -> None:
    with pytest.raises(InputError, match="float32, not in"):
        load(folder, weights="int8", dtype=torch.bfloat16)


def test_an_unknown_name_is_refused_with_those_allowed(folder: Path) -> None:
    with pytest.raises(InputError, match="'int8' or 'int4'"):
        load(folder, weights="int3")  # type: ignore[arg-type]


def test_weights_that_are_stored_in_another_format_are_not_rounded_again(
    folder: Path, tmp_path: Path
) -> None:
    save(load(folder, weights="int8"), tmp_path / "small")
    with pytest.raises(InputError, match="has int8 weights"):
        load(tmp_path / "small", weights="int4")


def test_damaged_codes_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    quantize_weights(model, "int8")
    save(model, tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("project.codes"))
    save_file({**tensors, name: tensors[name].float()}, file)
    with pytest.raises(InputError, match=r"project\.codes.*float32"):
        load(tmp_path / "small")
    save_file(tensors, file)
    config = tmp_path / "small" / "config.json"
    text = {**json.loads(config.read_text("utf-8")), "integer_weights": "int2"}
    config.write_text(json.dumps(text), "utf-8")
    with pytest.raises(InputError, match=r"int2.*int8, int4"):
        load(tmp_path / "small")
