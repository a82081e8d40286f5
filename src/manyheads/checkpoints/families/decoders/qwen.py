"""Qwen3, plain or gated (arXiv 2505.06708), and the experts that several families share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders.llama import LLAMA, LlamaFamily
from manyheads.checkpoints.families.family import Inner, Sources
from manyheads.checkpoints.tensor_map import Either, Entry, MapEntry, Stacked
from manyheads.errors import ConfigError
from manyheads.models import decoder, recipes
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.norms import NoNorm, RMSNorm

OUTPUT_GATES: dict[str, Literal["head", "channel"]] = {
    "headwise_attn_output_gate": "head",
    "elementwise_attn_output_gate": "channel",
}
# Keys of Qwen3 that the code of the study does not read.
NEWER = ("rope_parameters", "layer_types", "mlp_bias", "attention_bias")
# The default, whatever the width.
HEAD_SIZE = 128
# What a model without dense layers says of their hidden width.
DENSE_HIDDEN = 5632


class QwenGatedFamily(LlamaFamily):
    """Qwen3, plain or with output gates."""

    name = "qwen_gated"

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        gates = [key for key in OUTPUT_GATES if config_json.get(key)]
        if len(gates) > 1:
            raise ConfigError(
                f"{' and '.join(gates)} are both set", "set one: a layer has one gate"
            )
        # The study's qkv_bias includes the output projection; its code reads no other key.
        bias = config_json.get("qkv_bias", config_json.get("attention_bias", False))
        return super().complete({"head_dim": HEAD_SIZE, **config_json, "attention_bias": bias})

    def read_inner(self, parts: Parts, index: int) -> Inner:
        gates = [per for key, per in OUTPUT_GATES.items() if parts.json.get(key)]
        changes: dict[str, Any] = {"gates": tuple(Gate(at="output", per=per) for per in gates)}
        if not parts.json.get("use_qk_norm", True):
            changes |= {"query_norm": NoNorm(), "key_norm": NoNorm()}
        return replace(super().read_inner(parts, index), **changes)

    def write_config(self, config: recipes.ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, decoder.DecoderConfig) or not config.stack.layers:
            return None
        first, norm = config.stack.layers[0].attention, config.stack.final_norm
        if first is None or len(first.inner.gates) != 1:
            return None
        described = LLAMA.write_config(
            with_attention(config, gates=(), query_norm=norm, key_norm=norm)
        )
        if described is None or "sliding_attention" in described.get("layer_types", ()):
            return None
        rope = described["rope_parameters"]
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        # The code of the study rotates whole heads.
        if "partial_rotary_factor" in scaling:
            return None
        return {key: value for key, value in described.items() if key not in NEWER} | {
            **{key: first.inner.gates[0].per == per for key, per in OUTPUT_GATES.items()},
            "qkv_bias": first.inner.bias == "all",
            "use_qk_norm": isinstance(first.inner.query_norm, RMSNorm),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        }

    def opened_by(self, config_json: ConfigJson) -> str:
        """`transformers` would open a gated model too, but read its gates as queries."""
        gated = any(config_json.get(key) for key in OUTPUT_GATES)
        return "the gated-attention study's own code" if gated else "transformers"


QWEN_GATED = QwenGatedFamily()


class ExpertsFamily(LlamaFamily):
    """What families with experts in place of some feed-forwards share."""

    per_layer_keys = ()
    # Where the experts of a layer are, and the names of their matrices.
    experts: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def read_feedforward(self, parts: Parts, index: int) -> FeedForwardConfig:
        """The experts of a layer, or its dense feed-forward."""
        config_json, width = parts.json, parts.width
        step, dense = config_json["decoder_sparse_step"], config_json.get("mlp_only_layers") or ()
        mixed = config_json["num_experts"] > 0 and (index + 1) % step == 0
        if not mixed or index in dense:
            return SwiGLU(width=width, hidden=config_json["intermediate_size"])
        shared = config_json.get("shared_expert_intermediate_size", 0)
        return Experts(
            width=width,
            hidden=config_json["moe_intermediate_size"],
            count=config_json["num_experts"],
            top_k=config_json["num_experts_per_tok"],
            shared=shared,
            shared_gate="sigmoid" if shared else "none",
            renormalize=bool(config_json["norm_topk_prob"]),
        )

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        described = super().describe(config, parts)
        inside = [layer.feedforward.inner for layer in config.stack.layers if layer.feedforward]
        if described is None:
            return None
        del described["mlp_bias"]
        hidden = [inner.hidden for inner in inside if isinstance(inner, SwiGLU)]
        described["intermediate_size"] = hidden[0] if hidden else DENSE_HIDDEN
        return described | describe_experts(inside)

    def layer_table(self, layer: LayerConfig) -> Mapping[str, Sources]:
        if not has_experts(layer):
            return self.layer
        return {name: at for name, at in self.layer.items() if not name.startswith("feedforward.")}

    def layer_entries(self, layer: LayerConfig, name: str, source: str) -> Iterator[MapEntry]:
        """Files have one tensor per expert; `transformers` may also save all as one tensor."""
        if layer.feedforward is None or not isinstance(layer.feedforward.inner, Experts):
            return
        experts = layer.feedforward.inner
        name, source = f"{name}.feedforward", f"{source}.{self.experts}"
        gate, up, down = self.matrices
        places = [f"{source}.experts.{index}" for index in range(experts.count)]
        inside = [f"{place}.{part}.weight" for place in places for part in (gate, up)]
        outside = [f"{place}.{down}.weight" for place in places]
        for own, names, rows, joined in (
            ("expand", inside, experts.hidden, "gate_up_proj"),
            ("contract", outside, experts.width, "down_proj"),
        ):
            yield Either(
                Stacked(f"{name}.{own}", tuple(names), (rows,) * len(names), count=experts.count),
                Entry(f"{name}.{own}", (f"{source}.experts.{joined}",), transposed=True),
            )
        shared = f"{source}.shared_expert"
        pair = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
        yield Entry(f"{name}.router.weight", (f"{source}.gate.weight",))
        yield Entry(f"{name}.shared.expand.weight", pair)
        yield Entry(f"{name}.shared.contract.weight", (f"{shared}.down_proj.weight",))
        yield Entry(f"{name}.shared_gate.weight", (f"{source}.shared_expert_gate.weight",))


def has_experts(layer: LayerConfig) -> bool:
    return layer.feedforward is not None and isinstance(layer.feedforward.inner, Experts)


def with_attention(config: decoder.DecoderConfig, **changes: Any) -> decoder.DecoderConfig:
    """The config with changes to the attention of every layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        branch = layer.attention
        if branch is None:
            return layer
        return replace(layer, attention=replace(branch, inner=replace(branch.inner, **changes)))

    layers = tuple(changed(layer) for layer in config.stack.layers)
    return replace(config, stack=replace(config.stack, layers=layers))


def describe_experts(inside: Sequence[FeedForwardConfig]) -> dict[str, Any]:
    """The keys for the experts of a model, which must be alike in all layers that have them."""
    dense = [index for index, inner in enumerate(inside) if not isinstance(inner, Experts)]
    first = next((inner for inner in inside if isinstance(inner, Experts)), None)
    keys: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if first is None:
        return keys | {"num_experts": 0}
    return keys | {
        "num_experts": first.count,
        "num_experts_per_tok": first.top_k,
        "moe_intermediate_size": first.hidden,
        "norm_topk_prob": first.renormalize,
        **({"shared_expert_intermediate_size": first.shared} if first.shared else {}),
    }
