"""Whatever can be built can be saved and comes back bit by bit."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from manyheads import build, load, save
from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.native import CONFIG_JSON
from manyheads.checkpoints.files import WEIGHTS
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import get_config, list_configs
from manyheads.models.recipes import ModelConfig
from manyheads.parts.masks import Causal, GlobalTokens, Mask, Window
from manyheads.parts.positions import Rotary
from manyheads.parts.positions.rotary import YarnScaling
from tests.models.zoo import MODELS, answer, small, values

SMALL_TABLE = {"type": "Embedding", "vocabulary": 8, "width": 8}
ODD_ATTENTION = {"type": "AttentionConfig", "width": 8, "heads": 3}
ODD_STACK = {
    "width": 8,
    "layers": [{"attention": {"inner": ODD_ATTENTION}, "feedforward": None}],
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_bit_by_bit(name: str, tmp_path: Path) -> None:
    model = small(MODELS[name])
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert replace(again.config, init=model.config.init) == model.config
    for key, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor)
    assert torch.equal(values(answer(again).hidden), values(answer(model).hidden))
    assert not again.training
    assert all(parameter.requires_grad for parameter in again.parameters())


def test_saving_again_writes_the_same_bytes(tmp_path: Path) -> None:
    save(build("tiny-encoder", seed=0), tmp_path / "one")
    save(load(tmp_path / "one"), tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_the_dtype_is_the_requested_one(tmp_path: Path) -> None:
    model = build("tiny-encoder", seed=0, dtype=torch.bfloat16)
    save(model, tmp_path)
    kinds = {parameter.dtype for parameter in load(tmp_path).parameters()}
    assert kinds == {torch.bfloat16}
    kinds = {parameter.dtype for parameter in load(tmp_path, dtype=torch.float32).parameters()}
    assert kinds == {torch.float32}


def test_tied_weights_stay_tied_and_are_written_once(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    save(model, tmp_path)
    assert len(load_file(tmp_path / WEIGHTS)) == len(list(model.parameters()))
    assert load(tmp_path).readout.weight is None


def test_a_tokenizer_travels_with_its_model(tmp_path: Path) -> None:
    model = build("tiny-encoder", seed=0)
    model.tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    save(model, tmp_path)
    assert load(tmp_path).tokenizer.to_str() == model.tokenizer.to_str()


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    save(build("tiny-encoder", seed=0), tmp_path)
    assert load(tmp_path).tokenizer is None


def test_the_message_names_who_can_open_it(tmp_path: Path) -> None:
    assert "which only manyheads can open" in str(save(build("tiny-encoder", seed=0), tmp_path))


def test_every_tensor_that_does_not_fit_is_named(tmp_path: Path) -> None:
    save(build("tiny-encoder", seed=0), tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["stack.layers.0.attention.output.weight"] = torch.zeros(3, 4)
    del tensors["stack.layers.0.attention.output.bias"]
    tensors["extra"] = torch.zeros(1)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert "attention.output.weight has shape (3, 4), expected (128, 128)" in message
    assert "attention.output.bias (128,) is missing" in message
    assert "extra is not part of the model" in message


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "llm"}, "llm"),
        ({"model_type": "llama"}, "has no 'hidden_size'"),
        (
            {"model_type": "manyheads", "config": {"type": "Window", "before": 1}},
            r"config\.json: config\.type is 'Window': use .*'DecoderConfig'",
        ),
        ({"model_type": "manyheads"}, "config is None: use a table"),
        (
            {
                "model_type": "manyheads",
                "config": {"type": "DecoderConfig", "embedding": SMALL_TABLE, "stack": ODD_STACK},
            },
            r"config\.stack\.layers\.0\.attention\.inner: .*heads must divide width=\d+, got 3",
        ),
    ],
)
def test_a_foreign_config_is_refused(
    config: dict[str, object], reason: str, tmp_path: Path
) -> None:
    save(build("tiny-encoder", seed=0), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=reason):
        load(tmp_path)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no folder"):
        load(tmp_path / "nowhere")


def test_loading_takes_little_more_than_the_model_itself(tmp_path: Path) -> None:
    save(build("gpt2", layers=4, vocabulary=8000, seed=0), tmp_path)
    script = f"""
from pathlib import Path
import manyheads
from manyheads import Ragged, build, load  # everything is imported before memory is counted
build("gpt2", layers=1, width=16, heads=2, vocabulary=9, device="meta")

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

import safetensors.torch
before = status("VmRSS")
model = load({str(tmp_path)!r})
touched = sum(float(parameter.detach().sum()) for parameter in model.parameters())
size = sum(parameter.nbytes for parameter in model.parameters())
print((status("VmHWM") - before) / size)
import sys
assert "torch._dynamo" not in sys.modules, "the compiler takes two seconds, and nothing is compiled"
"""
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    # On some machines pages of the file itself count too; a second copy would make it 2.
    assert float(ran.stdout) < 1.4


def there_and_back(kind: Any, value: object) -> object:
    return CONFIG_JSON.decode(kind, json.loads(json.dumps(CONFIG_JSON.encode(value))), "config")


@pytest.mark.parametrize("config", [*MODELS.values(), *map(get_config, list_configs())])
def test_a_config_comes_back_equal(config: ModelConfig) -> None:
    assert there_and_back(ModelConfig, config) == config


def test_a_part_comes_back_equal() -> None:
    mask = (Window(3, 4) | GlobalTokens((0, -1))) & Causal()
    assert there_and_back(Mask, mask) == mask
    rotary = Rotary(theta=5.5, fraction=0.5, scaling=YarnScaling(factor=4.0, original_length=128))
    assert there_and_back(Rotary, rotary) == rotary


@pytest.mark.parametrize(
    ("changes", "problem", "remedy"),
    [
        ({"mask": {"type": "Wndow"}}, "config.mask.type is 'Wndow'", "'Window'"),
        ({"mask": {"type": "Window", "befor": 3}}, "config.mask.befor", "config.mask.before"),
        ({"mask": {"type": "Window"}}, "config.mask.before is missing", "add it"),
        ({"kv_heads": 5}, "kv_heads must divide heads=12 (1, 2, 3, 4, 6 or 12), got 5", ""),
        ({"bias": "some"}, "config.bias is 'some'", "'inputs'"),
        ({"position": {"type": "Rotary", "theta": "a"}}, "theta is 'a'", "a number"),
        ({"position": {"type": "Sinusoidal"}}, "'Sinusoidal'", "'Rotary'"),
        ({"heads": 2.0}, "config.heads is 2.0", "an integer"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(
    changes: dict[str, Any], problem: str, remedy: str
) -> None:
    table = {"type": "AttentionConfig", "width": 24, "heads": 12, **changes}
    with pytest.raises(ConfigError) as refusal:
        CONFIG_JSON.decode(AttentionConfig, table, "config")
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy
