"""Whisper as CTranslate2 stores it, against the model of `transformers` that was written."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor

from manyheads import load
from manyheads.bridge.ctranslate2_file import DTYPES, LAYER, NORMS, TOP, read_variables
from manyheads.errors import InputError
from tests.bridge.zoo import texts_of, tiny

HEADS = [[1, 0], [1, 1]]
IDS = {value: key for key, value in DTYPES.items()}


def variables_of(peer: Any) -> dict[str, Tensor]:
    """The weights of a Whisper by the names of CTranslate2, with joined projections."""
    state, variables = peer.state_dict(), {}
    for stack in ("encoder", "decoder"):
        heads = getattr(peer.config, f"{stack}_attention_heads")
        variables[f"{stack}/num_heads"] = torch.tensor(heads, dtype=torch.int16)
        for own, name in TOP.items():
            if (whole := f"model.{stack}.{name}") in state:
                variables[f"{stack}/{own}"] = state[whole]
        for layer in range(getattr(peer.config, f"{stack}_layers")):
            for module, targets in LAYER.items():
                names = [f"model.{stack}.layers.{layer}.{target}" for target in targets]
                for kind in ("weight", "bias"):
                    zeros = torch.zeros(peer.config.d_model)
                    parts = [state.get(f"{name}.{kind}", zeros) for name in names]
                    norm = {value: key for key, value in NORMS.items()}
                    own = norm[kind] if module.endswith("norm") else kind
                    if f"{names[-1]}.{kind}" in state:
                        variables[f"{stack}/layer_{layer}/{module}/{own}"] = torch.cat(parts)
    return variables


def text(name: str) -> bytes:
    return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"


def write(folder: Path, variables: dict[str, Tensor], version: int = 6) -> Path:
    """A folder of CTranslate2, after the description of its format."""
    data = struct.pack("<I", version) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, tensor in variables.items():
        stored = tensor.numpy().tobytes()
        data += text(name) + struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)
        data += struct.pack("<BI", IDS[tensor.dtype], len(stored)) + stored
    data += struct.pack("<I", 1) + text("decoder/projection/weight")
    data += text("decoder/embeddings/weight")
    folder.mkdir()
    words = {f"w{number}": number for number in range(2, 60)}
    special = {"<|endoftext|>": 0, "<|startoftranscript|>": 1}
    tokenizer = Tokenizer(models.WordLevel(special | words, unk_token="w2"))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "model.bin").write_bytes(data)
    (folder / "config.json").write_text(json.dumps({"alignment_heads": HEADS}))
    return folder


@pytest.fixture(scope="module")
def variables() -> dict[str, Tensor]:
    return variables_of(tiny("whisper"))


@pytest.mark.filterwarnings("ignore::manyheads.errors.WrappedModelWarning")
def test_logits_are_those_of_the_stored_model(variables: dict[str, Tensor], tmp_path: Path) -> None:
    ours: Any = load(write(tmp_path / "whisper", variables))
    example, peer = texts_of("whisper")[0], tiny("whisper")
    with torch.no_grad():
        logits = ours.inner(**example).logits
        assert torch.allclose(logits, peer(**example).logits, atol=1e-6)
    assert ours.generation["alignment_heads"] == HEADS
    assert ours.inner.get_output_embeddings().weight is ours.inner.get_input_embeddings().weight


def test_damaged_files_are_refused_by_name(variables: dict[str, Tensor], tmp_path: Path) -> None:
    folder = write(tmp_path / "whisper", variables)
    data = (folder / "model.bin").read_bytes()
    for end in (30, 200, len(data) - 3):
        (folder / "model.bin").write_bytes(data[:end])
        with pytest.raises(InputError, match=r"model\.bin"):
            load(folder)
    with pytest.raises(InputError, match="version 5"):
        read_variables(write(tmp_path / "old", variables, version=5) / "model.bin")
    scaled = {"decoder/embeddings/weight_scale": torch.ones(2)}
    with pytest.raises(InputError, match="quantized"):
        load(write(tmp_path / "quantized", variables | scaled))
    (folder / "model.bin").write_bytes(data)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load(folder)
    name = "encoder/layer_0/ffn/linear_1/bias"
    for label, wrong in (("short", {name: torch.ones(3)}), ("less", {})):
        rest = {key: value for key, value in variables.items() if key != name}
        with pytest.raises(InputError, match=r"layers\.0\.fc2\.bias does not fit"):
            load(write(tmp_path / label, rest | wrong))
