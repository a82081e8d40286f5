"""Qwen3, plain or gated (arXiv 2505.06708), and the experts that several families share."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.tensor_map import Either, Entry, Interleaved, Stacked
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.recipes import ModelConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.norms import NoNorm, PreNorm, RMSNorm

OUTPUT_GATES: dict[str, Literal["head", "channel"]] = {
    "headwise_attn_output_gate": "head",
    "elementwise_attn_output_gate": "channel",
}
# Keys of Qwen3 that the code of the study does not read.
NEWER = ("rope_parameters", "layer_types", "mlp_bias", "attention_bias")
# The default, whatever the width.
HEAD_SIZE = 128
# What a model without dense layers says of their hidden width.
HIDDEN = 5632


class QwenGatedFamily(Family):
    """Qwen3, plain or with output gates."""

    name = "qwen_gated"
    tied_copies = LLAMA.tied_copies
    per_layer_keys = LLAMA.per_layer_keys

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        gates = [key for key in OUTPUT_GATES if theirs.get(key)]
        if len(gates) > 1:
            raise ConfigError(
                f"{' and '.join(gates)} are both set", "set one: a layer has one gate"
            )
        # The study's qkv_bias includes the output projection; its code reads no other key.
        bias = theirs.get("qkv_bias", theirs.get("attention_bias", False))
        plain = LLAMA.read_config({"head_dim": HEAD_SIZE, **theirs, "attention_bias": bias})
        changes: dict[str, Any] = {
            "gates": tuple(Gate(at="output", per=OUTPUT_GATES[key]) for key in gates),
        }
        if not theirs.get("use_qk_norm", True):
            changes |= {"query_norm": NoNorm(), "key_norm": NoNorm()}
        assert isinstance(plain, DecoderConfig)
        return with_attention(plain, **changes)

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        first, norm = config.stack.layers[0].attention, config.stack.final_norm
        if first is None or len(first.inner.gates) != 1:
            return None
        described = LLAMA.write_config(
            with_attention(config, gates=(), query_norm=norm, key_norm=norm)
        )
        if described is None or "sliding_attention" in described["layer_types"]:
            return None
        rope = described["rope_parameters"]
        scaling = {key: each for key, each in rope.items() if key != "rope_theta"}
        # The code of the study rotates whole heads.
        if "partial_rotary_factor" in scaling:
            return None
        return {key: each for key, each in described.items() if key not in NEWER} | {
            **{key: first.inner.gates[0].per == per for key, per in OUTPUT_GATES.items()},
            "qkv_bias": first.inner.bias == "all",
            "use_qk_norm": isinstance(first.inner.query_norm, RMSNorm),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        return interleaved(LLAMA.tensor_map(config, ours), config, per="key head")

    def canonical_name(self, name: str) -> str | None:
        return LLAMA.canonical_name(name)

    def opened_by(self, theirs: Mapping[str, Any]) -> str:
        """`transformers` would open a gated model too, but read its gates as queries."""
        gated = any(theirs.get(key) for key in OUTPUT_GATES)
        return "the gated-attention study's own code" if gated else "transformers"


QWEN_GATED = QwenGatedFamily()


def with_attention(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The config with changes to the attention of every layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        branch = layer.attention
        if branch is None:
            return layer
        return replace(layer, attention=replace(branch, inner=replace(branch.inner, **changes)))

    layers = tuple(changed(layer) for layer in config.stack.layers)
    return replace(config, stack=replace(config.stack, layers=layers))


def interleaved(
    table: Iterable[Entry], config: ModelConfig, per: Literal["head", "key head"]
) -> list[Entry]:
    """The entries with the rows of gates in q_proj, after the queries of each head or group."""
    assert isinstance(config, DecoderConfig)
    gated = {
        f"stack.layers.{index}.attention.project": layer.attention.inner
        for index, layer in enumerate(config.stack.layers)
        if layer.attention is not None and layer.attention.inner.gates
    }

    def interleave(entry: Entry, attention: AttentionConfig) -> Entry:
        rows = attention.rows()
        blocks = rows.pop("query"), rows.pop("gate_output")
        groups = attention.heads if per == "head" else attention.key_heads
        theirs = (sum(blocks), *rows.values())
        return Interleaved(entry.ours, entry.theirs, theirs, blocks=blocks, groups=groups)

    names = ((entry, entry.ours.rpartition(".")[0]) for entry in table)
    return [interleave(entry, gated[name]) if name in gated else entry for entry, name in names]


def feedforward_of(theirs: Mapping[str, Any], index: int) -> FeedForwardConfig:
    """The experts of a layer, or its dense feed-forward."""
    width = theirs["hidden_size"]
    mixed = theirs["num_experts"] > 0 and (index + 1) % theirs["decoder_sparse_step"] == 0
    if not mixed or index in (theirs.get("mlp_only_layers") or ()):
        return SwiGLU(width=width, hidden=theirs["intermediate_size"])
    shared = theirs.get("shared_expert_intermediate_size", 0)
    return Experts(
        width=width,
        hidden=theirs["moe_intermediate_size"],
        count=theirs["num_experts"],
        top_k=theirs["num_experts_per_tok"],
        shared=shared,
        shared_gate="sigmoid" if shared else "none",
        renormalize=bool(theirs["norm_topk_prob"]),
    )


def feedforwards_of(config: ModelConfig) -> list[FeedForwardConfig] | None:
    """The feed-forwards of a decoder whose layers all have one and attention."""
    if not isinstance(config, DecoderConfig) or not config.stack.layers:
        return None
    whole = [
        each for each in config.stack.layers if each.feedforward and (each.attention or each.mixer)
    ]
    inside = [each.feedforward.inner for each in whole if each.feedforward is not None]
    return inside if len(inside) == len(config.stack.layers) else None


def as_dense(
    config: DecoderConfig, norm: RMSNorm, inside: Sequence[FeedForwardConfig]
) -> DecoderConfig:
    """The model with dense layers in place of experts, for a family without them to describe."""
    hidden = [inner.hidden for inner in inside if isinstance(inner, SwiGLU)]
    hidden.append(HIDDEN)
    dense = SwiGLU(width=config.stack.width, hidden=hidden[0])
    return with_norm_and_feedforward(config, norm, [dense] * len(inside))


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


def with_norm_and_feedforward(
    config: DecoderConfig, norm: RMSNorm, feedforwards: Iterable[FeedForwardConfig]
) -> DecoderConfig:
    def changed(layer: LayerConfig, inner: FeedForwardConfig) -> LayerConfig:
        assert layer.feedforward is not None
        first = {
            name: replace(branch, norm=PreNorm(norm))
            for name in ("attention", "mixer")
            if (branch := getattr(layer, name)) is not None
        }
        return replace(
            layer,
            **first,
            feedforward=Branch(inner, PreNorm(norm), layer.feedforward.dropout),
        )

    layers = map(changed, config.stack.layers, feedforwards)
    stack = replace(config.stack, layers=tuple(layers), final_norm=norm)
    return replace(config, stack=stack)


def expert_entries(
    experts: Experts,
    ours: str,
    theirs: str,
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Entry | Either]:
    """Files have one tensor per expert; `transformers` may also save all of them as one tensor."""
    each = [f"{theirs}.experts.{index}" for index in range(experts.count)]
    inside = [f"{one}.{part}.weight" for one in each for part in parts[:2]]
    outside = [f"{one}.{parts[2]}.weight" for one in each]
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
