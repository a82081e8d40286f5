"""Qwen3-Next with full attention only: output gates, centred norms, optionally experts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.families.llama import LLAMA
from manyheads.checkpoints.families.qwen_gated import interleaved, with_attention
from manyheads.checkpoints.tensor_map import Either, Entry, Stacked
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.recipes import ModelConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.norms import PreNorm, RMSNorm

# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "intermediate_size": 5632,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
GATES = (Gate(at="output", per="channel"),)


class QwenNextFamily(Family):
    """Qwen3-Next with full attention in every layer."""

    name = "qwen_next"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        _refuse_other_layers(theirs)
        plain = LLAMA.read_config({**theirs, "model_type": "qwen3", "sliding_window": None})
        assert isinstance(plain, DecoderConfig)
        norm = RMSNorm(eps=float(theirs["rms_norm_eps"]), centred=True)
        gated = with_attention(plain, gates=GATES, query_norm=norm, key_norm=norm)
        return _with_norm_and_feedforward(
            gated, norm, [_feedforward(theirs, index) for index in range(len(gated.stack.layers))]
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        norm, layers = config.stack.final_norm, config.stack.layers
        if not isinstance(norm, RMSNorm) or not all(each.attention for each in layers):
            return None
        inside = [each.feedforward.inner for each in layers if each.feedforward is not None]
        mixed = [inner for inner in inside if isinstance(inner, Experts)]
        if len(inside) < len(layers) or any(inner.shared_gate == "none" for inner in mixed):
            return None
        described = LLAMA.write_config(_as_qwen3(config, RMSNorm(eps=norm.eps), inside))
        if described is None or "sliding_attention" in described["layer_types"]:
            return None
        del described["mlp_bias"]
        described["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return described | {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [index for index, inner in enumerate(inside) if inner not in mixed],
            **_describe_experts(mixed),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Either]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table: list[Entry | Either] = [
            *interleaved(LLAMA.tensor_map(config, have), config, per="head")
        ]
        for index, layer in enumerate(config.stack.layers):
            if layer.feedforward is not None and isinstance(layer.feedforward.inner, Experts):
                below = f"stack.layers.{index}.feedforward", f"model.layers.{index}.mlp"
                table += _expert_entries(layer.feedforward.inner, *below)
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """As for Llama; neither we nor `transformers` use the multi-token prediction layers."""
        return None if name.startswith("mtp.") else LLAMA.canonical_name(name)


QWEN_NEXT = QwenNextFamily()


def _refuse_other_layers(theirs: Mapping[str, Any]) -> None:
    count, every = theirs["num_hidden_layers"], theirs["full_attention_interval"]
    kinds = theirs.get("layer_types") or [
        "linear_attention" if (index + 1) % every else "full_attention" for index in range(count)
    ]
    others = [index for index, kind in enumerate(kinds) if kind != "full_attention"]
    if others:
        found = ", ".join(sorted({kinds[index] for index in others}))
        raise ConfigError(
            f"layers {', '.join(map(str, others))} are {found}, and of Qwen3-Next only "
            "full_attention layers are known here so far",
            "use a model whose layer_types are all 'full_attention'",
        )


def _feedforward(theirs: Mapping[str, Any], index: int) -> FeedForwardConfig:
    width = theirs["hidden_size"]
    mixed = theirs["num_experts"] > 0 and (index + 1) % theirs["decoder_sparse_step"] == 0
    if not mixed or index in (theirs.get("mlp_only_layers") or ()):
        return SwiGLU(width=width, hidden=theirs["intermediate_size"])
    return Experts(
        width=width,
        hidden=theirs["moe_intermediate_size"],
        count=theirs["num_experts"],
        chosen=theirs["num_experts_per_tok"],
        shared=theirs["shared_expert_intermediate_size"],
        shared_gate="sigmoid",
        renormalise=bool(theirs["norm_topk_prob"]),
    )


def _as_qwen3(
    config: DecoderConfig, norm: RMSNorm, inside: Sequence[FeedForwardConfig]
) -> DecoderConfig:
    """The model as a Qwen3, with dense layers in place of experts."""
    hidden = [inner.hidden for inner in inside if isinstance(inner, SwiGLU)]
    hidden.append(DEFAULTS["intermediate_size"])
    dense = SwiGLU(width=config.stack.width, hidden=hidden[0])
    plain = with_attention(config, gates=(), query_norm=norm, key_norm=norm)
    return _with_norm_and_feedforward(plain, norm, [dense] * len(inside))


def _describe_experts(mixed: Sequence[Experts]) -> dict[str, Any]:
    if not mixed:
        return {"num_experts": 0}
    return {
        "num_experts": mixed[0].count,
        "num_experts_per_tok": mixed[0].chosen,
        "moe_intermediate_size": mixed[0].hidden,
        "shared_expert_intermediate_size": mixed[0].shared,
        "norm_topk_prob": mixed[0].renormalise,
    }


def _with_norm_and_feedforward(
    config: DecoderConfig, norm: RMSNorm, feedforwards: Iterable[FeedForwardConfig]
) -> DecoderConfig:
    def changed(layer: LayerConfig, inner: FeedForwardConfig) -> LayerConfig:
        assert layer.attention is not None
        assert layer.feedforward is not None
        return replace(
            layer,
            attention=replace(layer.attention, norm=PreNorm(norm)),
            feedforward=Branch(inner, PreNorm(norm), layer.feedforward.dropout),
        )

    layers = map(changed, config.stack.layers, feedforwards)
    stack = replace(config.stack, layers=tuple(layers), final_norm=norm)
    return replace(config, stack=stack)


def _expert_entries(experts: Experts, ours: str, theirs: str) -> Iterator[Entry | Either]:
    """Files have one tensor per expert; `transformers` may also save all of them as one tensor."""
    each = [f"{theirs}.experts.{index}" for index in range(experts.count)]
    inside = [f"{one}.{part}.weight" for one in each for part in ("gate_proj", "up_proj")]
    outside = [f"{one}.down_proj.weight" for one in each]
    for mine, names, rows, joined in (
        ("expand", inside, experts.hidden, "gate_up_proj"),
        ("contract", outside, experts.width, "down_proj"),
    ):
        name = f"{ours}.{mine}"
        yield Either(
            Stacked(name, tuple(names), (rows,) * len(names), count=experts.count),
            Entry(name, (f"{theirs}.experts.{joined}",), transposed=True),
        )
    shared = f"{theirs}.shared_expert"
    pair = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    yield Entry(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    yield Entry(f"{ours}.shared.expand.weight", pair, (experts.shared,) * 2)
    yield Entry(f"{ours}.shared.contract.weight", (f"{shared}.down_proj.weight",))
    yield Entry(f"{ours}.shared_gate.weight", (f"{theirs}.shared_expert_gate.weight",))
