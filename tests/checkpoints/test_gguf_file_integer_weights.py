"""Quantized GGUF files that stay integers in memory, beside the same files unpacked."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from manyheads import Ragged, generate, lens, load, save
from manyheads.errors import InputError
from manyheads.quantization import dequantize_weights
from manyheads.quantization.model_weights import layouts_of
from tests.checkpoints.gguf_files import TYPES, small, write

IDS = torch.arange(40)[None] * 7 % 60
# How far logits may be from those of the unpacked model: products of few tokens are in bfloat16,
# and eight bits are rounded again by row.
TOLERANCE = {"Q4_0": 0.01, "Q4_1": 0.01, "Q4_K": 0.01, "Q8_0": 0.03, "Q6_K": 0.05, "Q5_0": 0.03}
LAYOUTS = {"Q4_0": "q4_0", "Q4_1": "q4_1", "Q4_K": "q4_1"}


def llama(**changes: Any) -> Any:
    return small(transformers.LlamaConfig, **changes)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    return {
        kind: write(folder / f"{kind}.gguf", "llama", llama(), TYPES[kind])
        for kind in (*TOLERANCE, "F16")
    }


def difference(model: Any, exact: Any, ids: torch.Tensor = IDS) -> float:
    with torch.no_grad():
        logits, expected = model(ids).logits, exact(ids).logits
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", sorted(TOLERANCE))
def test_logits_are_close_to_those_of_the_unpacked_model(kind: str, files: dict[str, Path]) -> None:
    model, exact = load(files[kind], weights="stored"), load(files[kind])
    assert set(layouts_of(model).values()) == {LAYOUTS.get(kind, "int8")}
    # Two layers of four matrices, the embedding and the head.
    assert len(layouts_of(model)) == 10
    for ids in (IDS, IDS[:, :3], IDS.expand(3, 40)):
        assert difference(model, exact, ids) < TOLERANCE[kind]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_four_bits_keep_the_values_of_the_file(kind: str, files: dict[str, Path]) -> None:
    model, exact = load(files[kind], weights="stored"), load(files[kind])
    dequantize_weights(model)
    assert difference(model, exact) < 1e-6
    plain = exact.state_dict()
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_memory_is_near_the_size_of_the_file(kind: str, files: dict[str, Path]) -> None:
    model = load(files[kind], weights="stored")
    entries = gguf.GGUFReader(files[kind]).tensors
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert held < 1.15 * sum(int(entry.n_bytes) for entry in entries)


def test_tied_heads_multiply_by_the_codes_of_the_embedding(tmp_path: Path) -> None:
    file = write(tmp_path / "t.gguf", "llama", llama(tie_word_embeddings=True), TYPES.Q8_0)
    model, exact = load(file, weights="stored"), load(file)
    assert difference(model, exact) < TOLERANCE["Q8_0"]
    [written] = generate(model, [IDS[0, :8].tolist()], max_new_tokens=4, progress=False)
    assert len(written.ids) == 4


def test_kinds_of_one_layer_may_differ(tmp_path: Path) -> None:
    model = llama()
    kinds = {"q_proj": TYPES.Q4_0, "k_proj": TYPES.Q8_0, "up_proj": TYPES.Q4_1, "o_proj": TYPES.F16}
    file = write(tmp_path / "m.gguf", "llama", model, TYPES.Q4_0, kinds=kinds)
    layouts = layouts_of(load(file, weights="stored"))
    assert layouts["stack.layers.0.attention.project"] == "int8"
    assert layouts["stack.layers.0.feedforward.expand"] == "q4_1"
    assert "stack.layers.0.attention.output" not in layouts
    assert difference(load(file, weights="stored"), load(file)) < TOLERANCE["Q8_0"]


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_a_saved_model_keeps_its_codes(kind: str, files: dict[str, Path], tmp_path: Path) -> None:
    model = load(files[kind], weights="stored")
    saved = save(model, tmp_path / "saved")
    assert saved.opened_by == "manyheads"
    again = load(saved.folder)
    assert layouts_of(again) == layouts_of(model)
    assert difference(again, model) == 0


def test_the_lens_works(files: dict[str, Path]) -> None:
    model, exact = load(files["Q4_1"], weights="stored"), load(files["Q4_1"])
    batch = Ragged.from_list([IDS[0]])
    ours, unpacked = (lens.statistics(one, batch, progress=False) for one in (model, exact))
    np.testing.assert_allclose(ours["entropy"].means, unpacked["entropy"].means, rtol=0.01)
    worth, expected = (lens.ablate(one, batch, progress=False) for one in (model, exact))
    np.testing.assert_allclose(worth["change"].means, expected["change"].means, atol=0.01)
    labels, plain = (lens.kinds(one, progress=False).labels for one in (model, exact))
    assert labels.keys() == plain.keys()


def test_files_without_quantized_matrices_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"F16\.gguf has no quantized.*leave `weights` out"):
        load(files["F16"], weights="stored")


def test_folders_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    save(load(files["Q4_0"]), tmp_path / "folder")
    with pytest.raises(InputError, match=r"not a GGUF file.*int8, int4"):
        load(tmp_path / "folder", weights="stored")


def test_half_precision_is_refused(files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match="float32, not in"):
        load(files["Q4_0"], weights="stored", dtype=torch.bfloat16)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    model = small(transformers.LlamaConfig)
    file = write(tmp_path / "s.gguf", "stablelm", model, TYPES.Q8_0)
    with pytest.raises(InputError, match="stablelm"):
        load(file, weights="stored")
