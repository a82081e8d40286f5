"""What a GGUF file says about its model, as the config.json and tensor names of its family."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.families.windows import FULL, SLIDING, layer_kinds
from manyheads.checkpoints.gguf_file import DAMAGED, GGUFFile
from manyheads.errors import ConfigError, InputError

# The families of `transformers` that we translate, by the architecture in the file.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
GEMMA = ("gemma2", "gemma3")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma also normalizes what a sublayer writes.
GEMMA_INNER = INNER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<stem>[a-z_]+)\.(?P<kind>weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
# The number of layers by which llama.cpp knows the Gemma of 27B, whose scores have another scale.
LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}
# Llama 3 scales rotary frequencies between these; a file has only the outcome.
SLOW, FAST = 1.0, 4.0
# What differs between the layers of an uneven model, by its key in config.json.
PER_LAYER = {
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
}


@dataclass(frozen=True, slots=True)
class Translation:
    """A file in the terms of its family.

    `names` has the file's name for each tensor of the family, and `change` makes the family's
    tensor from the file's.
    """

    description: dict[str, Any]
    names: dict[str, str]
    change: Callable[[str, Tensor], Tensor]


def architecture_of(file: GGUFFile) -> str:
    """The architecture, such as llama; part of a model or something else is refused."""
    name = file.metadata.get("general.architecture")
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise InputError(
            f"{file.file} is one of {parts} parts of a model",
            "merge them with llama-gguf-split --merge, and load the result",
        )
    if not isinstance(name, str) or file.metadata.get("general.type", "model") != "model":
        kind = file.metadata.get("general.type")
        raise InputError(
            f"{file.file} has general.architecture={name!r:.100} and general.type={kind!r:.100}, "
            "so it is not a model",
            "give the file of a language model",
        )
    return name


def translate(file: GGUFFile) -> Translation:
    """The config.json and the tensors of a file whose architecture is one of `MODEL_TYPES`."""
    architecture = architecture_of(file)
    if architecture not in MODEL_TYPES:
        raise InputError(
            f"{file.file} has the architecture {architecture!r:.100}, which manyheads does not "
            "read from GGUF",
            f"use one of {', '.join(MODEL_TYPES)}, or the model's folder in safetensors",
        )
    facts = GgufMetadata(file, architecture)
    description = facts.description()
    inner = GEMMA_INNER if architecture in GEMMA else INNER
    # The factors of rotary frequencies are part of the config.
    names = {_translated(own, inner): own for own in file.tensors if own != ROPE_FACTORS}
    return Translation(description, names, facts.change)


def _translated(own: str, inner: dict[str, str]) -> str:
    """The family's name; what it does not have keeps its own, and the loader will name it."""
    match = NAME.fullmatch(own)
    if match is None:
        return own
    layer, stem, kind = match["layer"], match["stem"], match["kind"]
    if layer is None:
        return f"{TOP[stem]}.{kind}" if stem in TOP else own
    return f"model.layers.{layer}.{inner[stem]}.{kind}" if stem in inner else own


class GgufMetadata:
    """The metadata of one architecture."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self.architecture = file, architecture
        self.layers: int = self.integer("block_count")
        if not 0 < self.layers <= len(file.tensors):
            raise InputError(
                f"{file.file} has {architecture}.block_count={self.layers} and "
                f"{len(file.tensors)} tensors",
                DAMAGED,
            )

    def value(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default, int))

    def number(self, key: str, default: float | None = None) -> float:
        """A number, rounded as its writer had it: 1e-05, stored in 32 bits, is 9.9999997e-06."""
        return float(f"{self._number(key, default, (int, float)):.7g}")

    def _number(self, key: str, default: Any, kinds: Any) -> Any:
        number = self.value(key, default)
        if number is None:
            raise InputError(f"{self.file.file} has no {self.architecture}.{key}", DAMAGED)
        if not isinstance(number, kinds) or isinstance(number, bool):
            raise InputError(
                f"{self.file.file} has {self.architecture}.{key}={number!r:.100}, which is not a "
                "number",
                DAMAGED,
            )
        return number

    def per_layer(self, key: str) -> list[int]:
        """A number for each layer; most files have one for all."""
        numbers = self.value(key)
        if isinstance(numbers, list):
            if len(numbers) == self.layers and all(isinstance(number, int) for number in numbers):
                return numbers
            raise InputError(
                f"{self.file.file}: {self.architecture}.{key} must have {self.layers} integers, "
                f"got {numbers!r:.100}",
                DAMAGED,
            )
        return [self.integer(key)] * self.layers

    def change(self, own: str, tensor: Tensor) -> Tensor:
        """A tensor of the family, made from one of the file."""
        if self.architecture in GEMMA and own.endswith("norm.weight"):
            # Files have the whole factor, folders what is added to one.
            return tensor - 1
        if self.architecture == "llama" and re.search(r"\.attn_[qk]\.", own):
            # llama.cpp rotates neighbors, folders the first half of a head against the second.
            kind = "attention.head_count" if ".attn_q." in own else "attention.head_count_kv"
            heads = self._sizes(kind)[int(own.split(".")[1])]
            return tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def description(self) -> dict[str, Any]:
        """The content of a config.json."""
        if self.value("expert_count"):
            raise InputError(
                f"{self.file.file} has {self.value('expert_count')} experts per layer, which "
                "manyheads does not read from GGUF",
                "load the model's folder in safetensors",
            )
        width = self.integer("embedding_length")
        sizes = {key: self._sizes(name) for key, name in PER_LAYER.items()}
        # A size that differs between layers is that of the first, and of the others apart.
        common = {key: numbers[0] for key, numbers in sizes.items()}
        if min(map(min, sizes.values())) < 1:
            raise InputError(f"{self.file.file} has layers without attention", "use another model")
        head_size = self.integer("attention.key_length", width // common["num_attention_heads"])
        self._check_head_size(head_size)
        window = self.value("attention.sliding_window")
        model_type = MODEL_TYPES[self.architecture]
        if model_type == "llama" and (window or width % common["num_attention_heads"]):
            # The same arithmetic; `transformers` refuses such a Llama.
            model_type = "mistral"
        facts: dict[str, Any] = {
            "model_type": model_type,
            "architectures": [FAMILIES[model_type].classes[model_type] + "ForCausalLM"],
            "hidden_size": width,
            "num_hidden_layers": self.layers,
            **common,
            "head_dim": head_size,
            "vocab_size": self._vocabulary(),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.integer("context_length"),
            "rope_parameters": self._rope(head_size),
            "tie_word_embeddings": "output.weight" not in self.file.tensors,
            "attention_bias": "blk.0.attn_output.bias" in self.file.tensors,
            "hidden_act": "silu",
        }
        for use in ("bos", "eos"):
            token = self.file.metadata.get(f"tokenizer.ggml.{use}_token_id")
            facts[f"{use}_token_id"] = token if isinstance(token, int) else None
        if self.architecture in ("qwen2", "qwen3"):
            facts["use_sliding_window"] = False
        if model_type == "mistral":
            facts["sliding_window"] = window or None
        if model_type == "llama":
            facts["mlp_bias"] = "blk.0.ffn_down.bias" in self.file.tensors
        if self.architecture in GEMMA:
            facts |= self._gemma(head_size)
        uneven = [
            {key: numbers[layer] for key, numbers in sizes.items() if numbers[layer] != common[key]}
            for layer in range(self.layers)
        ]
        if any(uneven):
            facts["per_layer_config"] = {str(layer): own for layer, own in enumerate(uneven) if own}
        return facts

    def _sizes(self, name: str) -> list[int]:
        missing = self.value(name) is None and name.endswith("_kv")
        return self.per_layer(name.removesuffix("_kv") if missing else name)

    def _check_head_size(self, head_size: int) -> None:
        rotated = self.integer("rope.dimension_count", head_size)
        if {rotated, self.integer("attention.value_length", head_size)} != {head_size}:
            raise InputError(
                f"{self.file.file} has heads of {head_size} channels with values of "
                f"{self.value('attention.value_length', head_size)} and rotates {rotated}",
                "use a model with heads of one size, all of it rotated",
            )

    def _vocabulary(self) -> int:
        table = self.file.tensors.get("token_embd.weight")
        if table is None or len(table.shape) != 2:
            raise InputError(f"{self.file.file} has no matrix token_embd.weight", DAMAGED)
        rows = table.shape[0]
        words = self.integer("vocab_size", rows)
        tokens = len(self.file.metadata.get("tokenizer.ggml.tokens", ()))
        if words != rows or tokens > rows:
            raise InputError(
                f"{self.file.file} has {self.architecture}.vocab_size={words} and {tokens} tokens, "
                f"and token_embd.weight has {rows} rows",
                DAMAGED,
            )
        return rows

    def _rope(self, head_size: int) -> dict[str, Any]:
        theta = self.number("rope.freq_base", 10_000.0)
        rope: dict[str, Any] = {"rope_theta": theta}
        kind, factor = self.value("rope.scaling.type", "none"), self.value("rope.scaling.factor")
        # The key of older files.
        linear = self.value("rope.scale_linear")
        if linear and kind == "none" and linear != 1:
            return rope | {"rope_type": "linear", "factor": self.number("rope.scale_linear")}
        if ROPE_FACTORS in self.file.tensors:
            return rope | self._llama3(theta, head_size)
        if kind == "none" or not factor or factor == 1:
            return rope | {"rope_type": "default"}
        rope |= {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            length = self.integer("context_length")
            rope["original_max_position_embeddings"] = self.integer(
                "rope.scaling.original_context_length", length
            )
            for end in ("fast", "slow"):
                if self.value(f"rope.scaling.yarn_beta_{end}") is not None:
                    rope[f"beta_{end}"] = self.number(f"rope.scaling.yarn_beta_{end}")
        return rope

    def _llama3(self, theta: float, head_size: int) -> dict[str, Any]:
        """The scaling of Llama 3, from the divisors of the frequencies that a file has."""
        divisors = self.file.read(ROPE_FACTORS, torch.float64)
        if divisors.shape != (head_size // 2,) or not (divisors >= 0.999).all():
            raise InputError(
                f"{self.file.file}: {ROPE_FACTORS} has shape {tuple(divisors.shape)} for heads of "
                f"{head_size} channels, or values below 1",
                DAMAGED,
            )
        factor = float(f"{divisors.max().item():.6g}")
        if factor == 1:
            return {"rope_type": "default"}
        steps = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
        wavelengths = 2 * pi * theta**steps
        trained = self.value("rope.scaling.original_context_length")
        lengths = (8192, *(2**power for power in range(6, 21)))
        for length in (trained, *lengths) if trained else lengths:
            cycles = (length / wavelengths - SLOW) / (FAST - SLOW)
            smooth = cycles.clamp(0, 1)
            expected = 1 / ((1 - smooth) / factor + smooth)
            if torch.allclose(expected, divisors, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": SLOW,
                    "high_freq_factor": FAST,
                    "original_max_position_embeddings": length,
                }
        raise ConfigError(
            f"{ROPE_FACTORS} scales the rotary frequencies by another rule than Llama 3",
            "load the model's folder in safetensors",
        )

    def _gemma(self, head_size: int) -> dict[str, Any]:
        large = self.layers == LARGE_GEMMA[self.architecture]
        width = self.integer("embedding_length")
        scalar = width // self.per_layer("attention.head_count")[0] if large else head_size
        later = self.architecture == "gemma3"
        every = self.integer("attention.sliding_window_pattern", 6 if later else 2)
        facts: dict[str, Any] = {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.integer("attention.sliding_window", 4096),
        }
        if later:
            theta = self.number("rope.freq_base_swa", 10_000.0)
            local = {"rope_type": "default", "rope_theta": theta}
            facts["rope_parameters"] = {FULL: self._rope(head_size), SLIDING: local}
        else:
            facts["attn_logit_softcapping"] = self.number("attn_logit_softcapping", 50.0)
            facts["final_logit_softcapping"] = self.number("final_logit_softcapping", 30.0)
        kinds = layer_kinds({"num_hidden_layers": self.layers}, every)
        return {**facts, "layer_types": kinds}
