"""Mixtral and Qwen3-MoE: the attention of Mistral and Qwen3, experts in place of feed-forwards."""

from typing import Any

from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders.qwen import ExpertsFamily, has_experts

# What `transformers` assumes where config.json does not say it.
DEFAULTS: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
}


class Qwen3MoeFamily(ExpertsFamily):
    """Qwen3-MoE."""

    name = "qwen3_moe"
    classes = {"qwen3_moe": "Qwen3Moe"}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        shared = "shared_expert_intermediate_size"
        own = {key: value for key, value in config_json.items() if key != shared}
        if "num_local_experts" in own:
            own["num_experts"] = own["num_local_experts"]
        return super().complete({**DEFAULTS, **own})

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        described = super().describe(config, parts)
        if described is None or not any(map(has_experts, config.stack.layers)):
            return None
        del described["layer_types"]
        return described


class MixtralFamily(ExpertsFamily):
    """Mixtral."""

    name = "mixtral"
    classes = {"mixtral": "Mixtral"}
    experts = "block_sparse_moe"
    matrices = ("w1", "w3", "w2")

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        """With all of it in the words of Qwen3-MoE."""
        own = {
            "decoder_sparse_step": 1,
            "mlp_only_layers": (),
            "num_experts": config_json.get("num_local_experts", 8),
            "num_experts_per_tok": config_json.get("num_experts_per_tok", 2),
            "moe_intermediate_size": config_json["intermediate_size"],
            "shared_expert_intermediate_size": 0,
            "norm_topk_prob": True,
        }
        return super().complete({**config_json, **own})

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        described = super().describe(config, parts)
        if described is None or "moe_intermediate_size" not in described:
            return None
        sizes = {
            "intermediate_size": described.pop("moe_intermediate_size"),
            "num_local_experts": described.pop("num_experts"),
        }
        dropped = {"decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"}
        return {key: value for key, value in described.items() if key not in dropped} | sizes


MIXTRAL = MixtralFamily()
QWEN3_MOE = Qwen3MoeFamily()
