"""The gated Qwen of arXiv 2505.06708 in plain torch, from its formula: no library has the class."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.parity.comparing import VOCABULARY

__all__ = ["SMALL", "logits", "random_tensors", "write"]

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 64,
    "qkv_bias": False,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "headwise_attn_output_gate": False,
    "elementwise_attn_output_gate": False,
}


def gate_rows(config: dict[str, Any]) -> int:
    """Rows a query head adds to q_proj."""
    if config["headwise_attn_output_gate"]:
        return 1
    return int(config["head_dim"]) if config["elementwise_attn_output_gate"] else 0


def random_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    width, hidden = config["hidden_size"], config["intermediate_size"]
    heads, groups, size = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for index in range(config["num_hidden_layers"]):
        dense = {
            "self_attn.q_proj": (heads * (size + gate_rows(config)), width),
            "self_attn.k_proj": (groups * size, width),
            "self_attn.v_proj": (groups * size, width),
            "self_attn.o_proj": (width, heads * size),
        }
        layer = {f"{name}.weight": shape for name, shape in dense.items()}
        if config["qkv_bias"]:
            layer |= {f"{name}.bias": shape[:1] for name, shape in dense.items()}
        layer |= {
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
            "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }
        if config["use_qk_norm"]:
            layer |= {"self_attn.q_norm.weight": (size,), "self_attn.k_norm.weight": (size,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(shape, generator=generator) + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def logits(config: dict[str, Any], tensors: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Scores of the next word at each place of one sequence."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        layer = {
            name.removeprefix(prefix): each
            for name, each in tensors.items()
            if name.startswith(prefix)
        }
        x = x + _attend(config, layer, _norm(config, x, layer["input_layernorm.weight"]))
        inside = _norm(config, x, layer["post_attention_layernorm.weight"])
        gate = F.silu(inside @ layer["mlp.gate_proj.weight"].T)
        x = x + gate * (inside @ layer["mlp.up_proj.weight"].T) @ layer["mlp.down_proj.weight"].T
    x = _norm(config, x, tensors["model.norm.weight"])
    tied = config["tie_word_embeddings"]
    return x @ tensors["model.embed_tokens.weight" if tied else "lm_head.weight"].T


def _norm(config: dict[str, Any], x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()


def _dense(layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, layer[f"self_attn.{name}.weight"], layer.get(f"self_attn.{name}.bias"))


def _attend(config: dict[str, Any], layer: dict[str, Tensor], x: Tensor) -> Tensor:
    length, size = x.shape[0], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    each = heads // groups
    by_group = _dense(layer, "q_proj", x).view(length, groups, -1)
    query, gate = by_group.split([each * size, each * gate_rows(config)], dim=-1)
    query = query.reshape(length, heads, size)
    key = _dense(layer, "k_proj", x).view(length, groups, size)
    value = _dense(layer, "v_proj", x).view(length, groups, size)
    if config["use_qk_norm"]:
        query = _norm(config, query, layer["self_attn.q_norm.weight"])
        key = _norm(config, key, layer["self_attn.k_norm.weight"])
    query, key = (_turn(config, state) for state in (query, key))
    read = []
    for head in range(heads):
        scores = query[:, head] @ key[:, head // each].T / size**0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        pattern = scores.masked_fill(later, -torch.inf).softmax(-1)
        read.append(pattern @ value[:, head // each])
    output = torch.stack(read, dim=1)
    if gate_rows(config):
        output = output * gate.reshape(length, heads, -1).sigmoid()
    return _dense(layer, "o_proj", output.flatten(1))


def _turn(config: dict[str, Any], x: Tensor) -> Tensor:
    """Channel i and its partner half a head further turn as one complex number."""
    half = x.shape[-1] // 2
    speeds = config["rope_theta"] ** (-torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[0]).float(), speeds)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.cat((turned.real, turned.imag), dim=-1)
