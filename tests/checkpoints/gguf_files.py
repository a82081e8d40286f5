"""GGUF files of small random models, and the `transformers` models with the same weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

TOKENS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "he", "ll", "hell", "hello", "Ġhe", "1", "2", "Ċ"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ he"]
TYPES: Any = gguf.GGMLQuantizationType
SIZES = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
PERMUTED = ("llama",)
GEMMA = ("gemma2", "gemma3")


def small(config_class: Any, **changes: Any) -> Any:
    """A random model whose norms and biases are not trivial."""
    torch.manual_seed(0)
    config = config_class(**(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for tensor in model.parameters():
        if tensor.ndim == 1:
            torch.nn.init.normal_(tensor, std=0.2)
    return model


def write(
    path: Path,
    architecture: str,
    model: Any,
    kind: Any = TYPES.F32,
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    tokens: list[str] | None = None,
    kinds: dict[str, Any] | None = None,
) -> Path:
    """Write a model to a GGUF file; the model takes over what its weights are after that.

    Matrices whose names contain a key of `kinds` are stored as its value.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
    }
    for key, value in (keys | (metadata or {})).items():
        _add_metadata(writer, f"{architecture}.{key}", value)
    _add_tokenizer(writer, TOKENS if tokens is None else tokens)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config.num_hidden_layers,
    )
    tied = config.tie_word_embeddings
    state = model.state_dict()
    for name, tensor in state.items():
        if tied and name == "lm_head.weight":
            continue
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        values = tensor.numpy().copy()
        heads = _rotated(name, config) if architecture in PERMUTED else 0
        values = _permuted(values, heads) if heads else values
        if architecture in GEMMA and own.endswith("norm.weight"):
            values = values + 1
        own_kind = next((value for key, value in (kinds or {}).items() if key in name), kind)
        stored = TYPES.F32 if values.ndim == 1 else own_kind
        raw = stored_as(values, stored)
        writer.add_tensor(own, raw, raw_dtype=stored)
        again = gguf.quants.dequantize(raw.view(np.uint8), stored).reshape(values.shape)
        again = _unpermuted(again, heads) if heads else again
        again = again - 1 if architecture in GEMMA and own.endswith("norm.weight") else again
        tensor.copy_(torch.from_numpy(np.ascontiguousarray(again)))
    for own, values in (tensors or {}).items():
        writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_as(values: np.ndarray, kind: Any) -> np.ndarray:
    """The bytes of a tensor; random blocks where the package cannot quantize."""
    if kind not in (TYPES.Q4_K, TYPES.Q6_K):
        return gguf.quants.quantize(values, kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // 256, size), dtype=np.uint8)
    scale = np.full(1, 2e-5 if kind == TYPES.Q6_K else 2e-4, np.float16).view(np.uint8)
    if kind == TYPES.Q6_K:
        blocks[:, -2:] = scale
    else:
        blocks[:, :2], blocks[:, 2:4] = scale, scale
    return blocks.reshape(values.shape[0], -1)


def _add_metadata(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_float32(key, value)


def _add_tokenizer(writer: Any, tokens: list[str]) -> None:
    if not tokens:
        return
    special = ["<|end|>", "<|turn|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([1] * len(tokens) + [3] * len(special))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(len(tokens))
    writer.add_bos_token_id(len(tokens) + 1)
    writer.add_chat_template("{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}")


def _rotated(name: str, config: Any) -> int:
    if ".q_proj." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".k_proj." in name else 0


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    half = values.shape[0] // heads // 2
    return values.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(values.shape)


def _unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    half = values.shape[0] // heads // 2
    return values.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(values.shape)
