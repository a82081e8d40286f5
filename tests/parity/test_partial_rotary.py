"""`partial_rotary_factor` means what each family makes of it in `transformers`, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from manyheads import Ragged, load
from manyheads.errors import InputError
from tests.checkpoints.peer_models import randomized
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts

SHARED: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DECODER: dict[str, Any] = {**SHARED, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", DECODER),
    "mixtral": ("MixtralForCausalLM", {**DECODER, **EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**DECODER, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    ),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**DECODER, "layer_types": ["full_attention"] * 2, "mlp_only_layers": [0, 1]},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**SHARED, "cls_token_id": None, "sep_token_id": None, "local_attention": 8},
    ),
}
LINEAR = {"rope_type": "linear", "factor": 4.0}


def saved(name: str, place: Path) -> Path:
    kind, shape = FAMILIES[name]
    model = getattr(transformers, kind)
    config = model.config_class(**shape, attn_implementation="eager")
    randomized(model(config)).save_pretrained(place)
    return place


def with_factor(name: str, place: Path, at: str, scaling: dict[str, Any]) -> None:
    """Write the factor to config.json, at the top or where newer files have it."""
    file = place / "config.json"
    described = json.loads(file.read_text())
    rope = described["rope_parameters"]
    for each in rope.values() if name == "modernbert" else [rope]:
        each.pop("partial_rotary_factor", None)
        each.update(scaling)
        if at == "rope_parameters":
            each["partial_rotary_factor"] = 0.5
    if at == "top":
        described["partial_rotary_factor"] = 0.5
    file.write_text(json.dumps(described))


def peer_model(name: str, place: Path) -> list[torch.Tensor]:
    opener = getattr(transformers, FAMILIES[name][0])
    model = opener.from_pretrained(place, attn_implementation="eager").eval()
    more = {} if name == "modernbert" else {"use_cache": False}
    return each_alone(model, texts(), **more)


@pytest.mark.parametrize("at", ["nowhere", "top", "rope_parameters"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_factor_follows_the_family(name: str, at: str, tmp_path: Path) -> None:
    place = saved(name, tmp_path)
    with_factor(name, place, at, {})
    with torch.no_grad():
        result = load(place)(Ragged.from_list(texts())).logits
    assert_same(result, peer_model(name, place))


@pytest.mark.parametrize("at", ["top", "rope_parameters"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_next"])
def test_a_factor_beside_a_scaling_is_refused_where_they_fail(
    name: str, at: str, tmp_path: Path
) -> None:
    place = saved(name, tmp_path)
    with_factor(name, place, at, LINEAR)
    if name == "qwen3_next":
        with torch.no_grad():
            result = load(place)(Ragged.from_list(texts())).logits
        assert_same(result, peer_model(name, place))
        return
    with pytest.raises(InputError, match=r"partial_rotary_factor=0\.5"):
        load(place)
    with pytest.raises(RuntimeError):
        peer_model(name, place)
