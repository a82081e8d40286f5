"""Qwen3, plain or gated (arXiv 2505.06708), and Qwen3-Next with its gated delta nets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.family import Family, eps_of
from manyheads.checkpoints.tensor_map import Either, Entry, Interleaved, Packed, Stacked
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.gated_delta import GatedDelta
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
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
FULL, LINEAR = "full_attention", "linear_attention"
DELTA_NAMES = {
    "dt_bias": "dt_bias",
    "log_rate": "A_log",
    "norm_weight": "norm.weight",
    "output.weight": "out_proj.weight",
}
GATES = (Gate(at="output", per="channel"),)


class QwenNextFamily(Family):
    """Qwen3-Next: gated attention in some layers, gated delta nets in the others."""

    name = "qwen_next"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        kinds = _layer_kinds(theirs)
        plain = LLAMA.read_config(theirs)
        assert isinstance(plain, DecoderConfig)
        norm = RMSNorm(eps=eps_of(theirs, "rms_norm_eps"), centred=True)
        gated = with_attention(plain, gates=GATES, query_norm=norm, key_norm=norm)
        delta = GatedDelta(
            width=theirs["hidden_size"],
            heads=theirs["linear_num_value_heads"],
            head_size=theirs["linear_value_head_dim"],
            key_heads=theirs["linear_num_key_heads"],
            key_size=theirs["linear_key_head_dim"],
            convolution=theirs["linear_conv_kernel_dim"],
            eps=norm.eps,
        )
        layers = tuple(
            replace(layer, attention=None, mixer=Branch(delta)) if kind == LINEAR else layer
            for layer, kind in zip(gated.stack.layers, kinds, strict=True)
        )
        mixed = replace(gated, stack=replace(gated.stack, layers=layers))
        return with_norm_and_feedforward(
            mixed, norm, [feedforward_of(theirs, index) for index in range(len(layers))]
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        inside = feedforwards_of(config)
        if inside is None:
            return None
        assert isinstance(config, DecoderConfig)
        norm, mixed = config.stack.final_norm, [each for each in inside if type(each) is Experts]
        if not isinstance(norm, RMSNorm) or any(inner.shared_gate == "none" for inner in mixed):
            return None
        head_norm = RMSNorm(eps=norm.eps)
        attending = _with_attention_everywhere(config)
        if attending is None:
            return None
        plain = with_attention(attending, gates=(), query_norm=head_norm, key_norm=head_norm)
        described = LLAMA.write_config(as_dense(plain, head_norm, inside))
        if described is None or "sliding_attention" in described["layer_types"]:
            return None
        del described["mlp_bias"]
        described["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return described | {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            **describe_experts(inside),
            **_describe_mixers(config),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Either | Packed]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table: list[Entry | Either | Packed] = [
            *interleaved(LLAMA.tensor_map(config, have), config, per="head")
        ]
        for index, layer in enumerate(config.stack.layers):
            if layer.feedforward is not None and isinstance(layer.feedforward.inner, Experts):
                below = f"stack.layers.{index}.feedforward", f"model.layers.{index}.mlp"
                table += expert_entries(layer.feedforward.inner, *below)
            if layer.mixer is not None and isinstance(layer.mixer.inner, GatedDelta):
                below = f"stack.layers.{index}.mixer", f"model.layers.{index}.linear_attn"
                table += _delta_entries(layer.mixer.inner, *below)
        return [entry for entry in table if isinstance(entry, Packed) or entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """As for Llama; neither we nor `transformers` use the multi-token prediction layers."""
        return None if name.startswith("mtp.") else LLAMA.canonical_name(name)


QWEN_NEXT = QwenNextFamily()


def _layer_kinds(theirs: Mapping[str, Any]) -> list[str]:
    count, every = theirs["num_hidden_layers"], theirs["full_attention_interval"]
    kinds = theirs.get("layer_types") or [
        LINEAR if (index + 1) % every else FULL for index in range(count)
    ]
    if len(kinds) != count or not set(kinds) <= {FULL, LINEAR}:
        raise ConfigError(f"layer_types must have {FULL} or {LINEAR} for each of {count} layers")
    return list(kinds)


def _with_attention_everywhere(config: DecoderConfig) -> DecoderConfig | None:
    """The model with its first attention in place of every mixer, for Llama to describe."""
    layers = config.stack.layers
    first = next((layer.attention for layer in layers if layer.attention is not None), None)
    if first is None:
        return None
    attending = tuple(
        layer if layer.mixer is None else replace(layer, attention=first, mixer=None)
        for layer in layers
    )
    return replace(config, stack=replace(config.stack, layers=attending))


def _describe_mixers(config: DecoderConfig) -> dict[str, Any]:
    layers = config.stack.layers
    found = [layer.mixer.inner for layer in layers if layer.mixer is not None]
    first = next((mixer for mixer in found if isinstance(mixer, GatedDelta)), None)
    if first is None:
        return {}
    return {
        "layer_types": [FULL if layer.mixer is None else LINEAR for layer in layers],
        "linear_num_value_heads": first.heads,
        "linear_value_head_dim": first.head_size,
        "linear_num_key_heads": first.key_heads,
        "linear_key_head_dim": first.key_size,
        "linear_conv_kernel_dim": first.convolution,
    }


def _delta_entries(mixer: GatedDelta, ours: str, theirs: str) -> Iterator[Entry | Packed]:
    """Their projections are stored by key head: q k v z together, and b a together."""
    rows = mixer.rows()
    wide = tuple(rows[name] for name in ("query", "key", "value", "gate"))
    narrow = rows["beta"], rows["pace"]
    yield Interleaved(
        f"{ours}.project.weight",
        (f"{theirs}.in_proj_qkvz.weight",),
        (sum(wide),),
        blocks=wide,
        groups=mixer.key_heads,
    )
    yield Interleaved(
        f"{ours}.rates.weight",
        (f"{theirs}.in_proj_ba.weight",),
        (sum(narrow),),
        blocks=narrow,
        groups=mixer.key_heads,
    )
    shape = (sum(wide[:3]), mixer.convolution)
    own = {f"{ours}.convolution.weight": shape}
    yield Packed(own, f"{theirs}.conv1d.weight", (shape[0], 1, shape[1]))
    for mine, other in DELTA_NAMES.items():
        yield Entry(f"{ours}.{mine}", (f"{theirs}.{other}",))


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
        renormalise=bool(theirs["norm_topk_prob"]),
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
    hidden.append(DEFAULTS["intermediate_size"])
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
        "norm_topk_prob": first.renormalise,
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
