"""Files with the names of earlier versions still open."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from manyheads import load, save
from manyheads.mixers.build import MixerConfig
from manyheads.mixers.recurrent.kimi_delta import KimiDelta
from manyheads.mixers.recurrent.mamba import Mamba
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.mixers.recurrent.s4d import S4D
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.renamed_keys import KEYS, TENSORS
from manyheads.train.distributed import ProcessGroup
from manyheads.train.loop.checkpoint import (
    MANIFEST,
    Checkpoints,
    TrainingState,
    restore,
    state_tensors,
)
from tests.mixers.mixer_configs import WIDTH, small_model

MIXERS: dict[str, MixerConfig] = {
    "s4d": S4D(width=WIDTH, state_size=8),
    "kimi delta": KimiDelta(width=WIDTH, heads=2, head_size=6),
    "mamba": Mamba(width=WIDTH, inner=24, state_size=5, dt_rank=3),
    "mamba2": Mamba2(width=WIDTH, heads=4, head_size=8, state_size=6, groups=2),
    "big bird": BigBird(width=WIDTH, heads=2, block=3, random_blocks=2, max_length=1024),
}


def with_old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where the parameter of a mixer has had another name."""
    old = {new: name for name, new in TENSORS.items() if new != "dt_bias"}
    named: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        before, mixer, after = name.partition(".mixer.")
        parts = after.split(".")
        # Only Mamba and S4D called it a pace.
        paced = any(key.endswith((".dt_weight", ".A_imag")) for key in tensors)
        if parts[0] == "dt_bias" and paced:
            parts[0] = "pace_bias"
        named[before + mixer + ".".join([old.get(parts[0], parts[0]), *parts[1:]])] = tensor
    return named


@pytest.mark.parametrize("name", MIXERS)
def test_native_folders_with_earlier_names_open(name: str, tmp_path: Path) -> None:
    model = small_model(MIXERS[name])
    save(model, tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    renamed = with_old_names(tensors)
    assert name == "big bird" or renamed.keys() != tensors.keys()
    save_file(renamed, file)
    text = config.read_text()
    written = json.loads(text)
    for old in ("longest", "pace_rank"):
        text = text.replace(f'"{KEYS[old]}"', f'"{old}"')
    assert name not in ("mamba", "big bird") or text != config.read_text()
    config.write_text(text)
    again = load(tmp_path)
    assert again.config == model.config
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    save(again, tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == tensors.keys()
    assert json.loads((tmp_path / "again/config.json").read_text()) == written


@pytest.mark.parametrize("name", ["mamba", "s4d"])
def test_training_states_with_earlier_names_are_restored(name: str, tmp_path: Path) -> None:
    model = small_model(MIXERS[name])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(6).reshape(2, 3)).logits.square().mean().backward()
    optimizer.step()
    tensors, numbers = state_tensors(model, optimizer)
    processes = ProcessGroup()
    checkpoints = Checkpoints(tmp_path, processes, keep=1)
    checkpoints.save(with_old_names(tensors), TrainingState(step=1, numbers=numbers))
    checkpoints.wait()
    assert (tmp_path / "step-1" / MANIFEST).exists()
    fresh = small_model(MIXERS[name])
    again = torch.optim.AdamW(fresh.parameters())
    assert restore(tmp_path / "step-1", fresh, again, processes).step == 1
    restored, _ = state_tensors(fresh, again)
    assert restored.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert torch.equal(restored[key], tensor), key
