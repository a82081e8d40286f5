"""Tiny random models of `transformers`, with heads that are far from uniform, and their inputs."""

from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    **SPECIAL,
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4}
LATENT = {
    **GROUPED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
PAIR = {
    **SPECIAL,
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 60,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
GPT2 = {**SPECIAL, "vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DISTIL = {
    "vocab_size": 60,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
LOCAL = {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1}
SPEECH = {**PAIR, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 16}

# Class, config class and its arguments, by a short name.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "sliding_window": 5}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**GROUPED, **EXPERTS, "sliding_window": 5}),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, **EXPERTS}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**TEXT, **LOCAL}),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", TEXT),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", SPEECH),
    "vit": ("ViTForImageClassification", "ViTConfig", IMAGE),
}
SOURCES = [[5, 6, 7, 8, 5, 6, 9, 3, 4], [11, 12, 11, 12, 13]]
TARGETS = [[1, 7, 8, 7, 8, 9], [1, 20, 21, 20]]


@cache
def tiny(name: str) -> Any:
    """The model, in eval mode; do not change it."""
    model_class, config_class, arguments = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**arguments)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.normal_(std=0.3)
    return model


def texts_of(name: str) -> Any:
    """Two inputs of different lengths, as the lens takes them."""
    if name == "vit":
        generator = torch.Generator().manual_seed(1)
        return list(torch.randn(2, 3, 16, 16, generator=generator))
    if name == "whisper":
        generator = torch.Generator().manual_seed(1)
        sounds = torch.randn(2, 1, 16, 32, generator=generator)
        pairs = zip(sounds, TARGETS, strict=True)
        return [
            {"input_features": sound, "decoder_input_ids": torch.tensor([ids])}
            for sound, ids in pairs
        ]
    return list(zip(SOURCES, TARGETS, strict=True)) if name in ("t5", "bart") else SOURCES


def arguments_of(text: Any) -> dict[str, Tensor]:
    """One input as `transformers` takes it, without any padding."""
    if isinstance(text, dict):
        return dict(text)
    if isinstance(text, Tensor):
        return {"pixel_values": text[None]}
    if isinstance(text, tuple):
        source, target = (torch.tensor([each]) for each in text)
        return {"input_ids": source, "decoder_input_ids": target}
    return {"input_ids": torch.tensor([text])}
