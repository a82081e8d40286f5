"""Mixtral and Qwen3-MoE: the attention of Mistral and Qwen3, experts in place of feed-forwards."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.checkpoints.families.decoders.llama import CLASSES, LLAMA
from manyheads.checkpoints.families.decoders.qwen import (
    as_dense,
    describe_experts,
    expert_entries,
    feedforward_of,
    feedforwards_of,
    with_norm_and_feedforward,
)
from manyheads.checkpoints.families.family import CAUSAL_HEADS, Family
from manyheads.checkpoints.tensor_map import Either, Entry
from manyheads.models.decoder import DecoderConfig
from manyheads.models.recipes import ModelConfig
from manyheads.parts.experts import Experts
from manyheads.parts.norms import RMSNorm

# The defaults of Qwen3-MoE where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}
# The names of the feed-forward and of an expert's matrices in Mixtral's files.
BLOCK = "block_sparse_moe"
PARTS = ("w1", "w3", "w2")


class MixtralFamily(Family):
    """Mixtral and Qwen3-MoE."""

    name = "mixtral"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        plain = LLAMA.read_config(theirs)
        assert isinstance(plain, DecoderConfig)
        keys = _expert_keys(theirs)
        inside = [feedforward_of(keys, index) for index in range(len(plain.stack.layers))]
        norm = plain.stack.final_norm
        assert isinstance(norm, RMSNorm)
        return with_norm_and_feedforward(plain, norm, inside)

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        inside = feedforwards_of(config)
        if inside is None or not any(isinstance(each, Experts) for each in inside):
            return None
        assert isinstance(config, DecoderConfig)
        norm = config.stack.final_norm
        if not isinstance(norm, RMSNorm):
            return None
        described = LLAMA.write_config(as_dense(config, norm, inside))
        if described is None or type(config.readout) not in CAUSAL_HEADS:
            return None
        family, experts = "mixtral", describe_experts(inside)
        if described["model_type"] == "qwen3":
            family = "qwen3_moe"
            del described["layer_types"]
        else:
            described |= {
                "sliding_window": described.get("sliding_window"),
                "intermediate_size": experts["moe_intermediate_size"],
                "num_local_experts": experts["num_experts"],
            }
            experts = {"num_experts_per_tok": experts["num_experts_per_tok"]}
        del described["mlp_bias"]
        head = CAUSAL_HEADS[type(config.readout)]
        names = {"model_type": family, "architectures": [CLASSES[family] + head]}
        return described | experts | names

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Either]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table: list[Entry | Either] = [*LLAMA.tensor_map(config, have)]
        for index, layer in enumerate(config.stack.layers):
            if layer.feedforward is None or not isinstance(layer.feedforward.inner, Experts):
                continue
            mine, theirs = f"stack.layers.{index}.feedforward", f"model.layers.{index}"
            if _is_mixtral(config):
                below = mine, f"{theirs}.{BLOCK}", PARTS
                table += expert_entries(layer.feedforward.inner, *below)
            else:
                table += expert_entries(layer.feedforward.inner, mine, f"{theirs}.mlp")
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        return LLAMA.canonical_name(name)


MIXTRAL = MixtralFamily()


def _expert_keys(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """What either family says of its experts, in the words of Qwen3-MoE."""
    if theirs["model_type"] == "qwen3_moe":
        counts = (
            {"num_experts": theirs["num_local_experts"]} if "num_local_experts" in theirs else {}
        )
        own = {
            key: each for key, each in theirs.items() if key != "shared_expert_intermediate_size"
        }
        return {**DEFAULTS, **own, **counts}
    return {
        "hidden_size": theirs["hidden_size"],
        "decoder_sparse_step": 1,
        "num_experts": theirs.get("num_local_experts", 8),
        "num_experts_per_tok": theirs.get("num_experts_per_tok", 2),
        "moe_intermediate_size": theirs["intermediate_size"],
        "norm_topk_prob": True,
    }


def _is_mixtral(config: DecoderConfig) -> bool:
    """Only Qwen3-MoE normalizes queries and keys."""
    attention = config.stack.attention(0)
    return attention is not None and not isinstance(attention.query_norm, RMSNorm)
