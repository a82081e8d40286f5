"""What a folder says of a model beyond its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    BertForTokenClassification,
)

from manyheads import build, load, save
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.families.family import Family
from manyheads.errors import ConfigError, InputError
from manyheads.models.provenance import SentenceConfig
from manyheads.surgery import origins, prune
from manyheads.train.regularizers import L0Gates
from tests.parity.comparing import VOCABULARY, texts

TINY = {"layers": 2, "width": 32, "heads": 4, "vocabulary": VOCABULARY}
BUILT: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "gpt2": ("gpt2", AutoModelForCausalLM, TINY),
    "bert-base": ("bert", AutoModelForMaskedLM, TINY | {"hidden": 48}),
    "modernbert-base": ("modernbert", AutoModelForMaskedLM, TINY | {"hidden": 48}),
    "llama-1b-shape": (
        "llama",
        AutoModelForCausalLM,
        TINY | {"hidden": 48, "kv_heads": 2, "head_size": 8},
    ),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_built_model_opens_in_transformers_with_the_same_logits(
    name: str, tmp_path: Path
) -> None:
    family, opener, numbers = BUILT[name]
    model: Any = build(name, seed=0, **numbers)
    assert save(model, tmp_path).family == family
    peer = opener.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        for text in texts():
            result, expected = peer(text[None]).logits, model(text[None]).logits
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


def test_an_image_model_opens_in_transformers(tmp_path: Path) -> None:
    model: Any = build(
        "vit-b16", layers=1, width=32, heads=4, hidden=48, image=32, classes=7, seed=0
    )
    torch.nn.init.normal_(model.readout.weight)
    assert save(model, tmp_path).family == "vit"
    peer = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(peer(images).logits, model(images).logits, atol=1e-4, rtol=0)


def test_keys_without_a_field_come_back_unchanged(tmp_path: Path) -> None:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=20,
        id2label={0: "O", 1: "B-PER", 2: "I-PER"},
        classifier_dropout=0.3,
    )
    BertForTokenClassification(config).save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    one, other = (
        json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours")
    )
    assert one == other


def test_every_family_has_all_hooks() -> None:
    hooks = [name for name in vars(Family) if not name.startswith("_")]
    assert {"read_config", "write_config", "tensor_map", "canonical_name"} <= set(hooks)
    for family in FAMILIES.values():
        assert all(hasattr(family, name) for name in hooks)
        assert family.name


def test_our_own_layout_is_the_last_family() -> None:
    assert list(FAMILIES)[-1] == "manyheads"


def test_folders_near_one_of_a_model_point_on(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is the folder of a run: use its model, .*run/model"):
        load(tmp_path / "run")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="holds an adapter, not a model"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_head", "4"),
        ("n_embd", None),
        ("vocab_size", 61.0),
        ("layer_norm_epsilon", "small"),
        ("architectures", 3),
    ],
)
def test_a_config_with_a_value_of_another_type_is_refused(
    key: str, value: object, tmp_path: Path
) -> None:
    save(build("gpt2", seed=0, **TINY), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(InputError, match=r"config\.json"):
        load(tmp_path)


def test_a_family_that_is_no_name_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ["gpt2"]}')
    with pytest.raises(InputError, match=r"model_type=\['gpt2'\], which manyheads does not"):
        load(tmp_path)


def test_a_surplus_tensor_is_called_as_in_the_file(tmp_path: Path) -> None:
    save(build("gpt2", seed=0, **TINY), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "extra.thing": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r": extra\.thing is not part"):
        load(tmp_path)


def test_a_device_or_type_that_cannot_be_is_refused(tmp_path: Path) -> None:
    save(build("gpt2", seed=0, **TINY), tmp_path)
    with pytest.raises(InputError, match="auto, cpu or cuda, got 'gpu'"):
        load(tmp_path, device="gpu")
    with pytest.raises(InputError, match=r"dtype must be .*got torch\.int8"):
        load(tmp_path, dtype=torch.int8)
    assert load(tmp_path, device=torch.device("cpu")).config


@pytest.mark.parametrize("name", ["gpt2", "tiny-encoder"])
def test_gates_beside_a_model_are_not_lost_without_a_word(name: str, tmp_path: Path) -> None:
    model = build(name, seed=0, **(TINY if name == "gpt2" else {}))
    L0Gates(weight=1.0).attach(model)
    with pytest.raises(ConfigError, match=r"head_gates\.gate_probability\.0.*L0Gates"):
        save(model, tmp_path / "one")
    assert not (tmp_path / "one").exists()


def test_facts_of_an_older_model_are_not_written_for_a_new_one(tmp_path: Path) -> None:
    model: Any = build("bert-base", seed=0, **TINY, hidden=48)
    model.sentence, model.generation = SentenceConfig(normalize=True), {"eos_token_id": 3}
    pruned = prune(model, ["L0H1"])
    save(pruned, tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    assert load(tmp_path).sentence is not None
    fresh: Any = build("gpt2", seed=0, **TINY)
    save(fresh, tmp_path)
    again = load(tmp_path)
    assert (again.sentence, again.generation) == (None, {})
    assert all(new == old for new, old in origins(again).items())
    assert (tmp_path / "notes.txt").read_text() == "mine"
