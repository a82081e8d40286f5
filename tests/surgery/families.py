"""Small models of `transformers`, the same in ours, and what each of them answers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from manyheads import Ragged, load
from tests.checkpoints.peer_models import randomized
from tests.parity.comparing import VOCABULARY, texts

__all__ = ["FAMILIES", "Family", "shaken"]

QUIET = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
LENGTHS = (7, 3, 12)


@dataclass(frozen=True)
class Family:
    """A model of theirs, and the modules that `peft` would adapt in it."""

    make: Callable[[], Any]
    modules: tuple[str, ...]
    kind: str = "text"

    def both(self, place: Path) -> tuple[Any, Any]:
        """Theirs, and ours from its files."""
        peer = randomized(self.make())
        peer.save_pretrained(place / "base")
        return peer, load(place / "base")

    def of_theirs(self, model: Any) -> Tensor:
        if self.kind == "images":
            return torch.cat([model(image[None]).logits[0] for image in images()])
        if self.kind == "pairs":
            both = zip(texts(LENGTHS), texts(LENGTHS, seed=1), strict=True)
            return torch.cat(
                [model(input_ids=a[None], decoder_input_ids=b[None]).logits[0] for a, b in both]
            )
        return torch.cat([model(input_ids=each[None]).logits[0] for each in texts(LENGTHS)])

    def of_ours(self, model: Any) -> Tensor:
        if self.kind == "images":
            return model(images()).logits.flatten()
        if self.kind == "pairs":
            both = (Ragged.from_list(texts(LENGTHS, seed=seed)) for seed in (0, 1))
            return model(*both).logits.values
        return model(Ragged.from_list(texts(LENGTHS))).logits.values


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 8, 8, generator=generator) for _ in range(2)]


def shaken(module: nn.Module, *, seed: int = 0, fitting: str = "") -> None:
    """Large numbers for every parameter that learns, or whose name has this in it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if (fitting in name) if fitting else parameter.requires_grad:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def gpt2() -> Any:
    shape = {"n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": VOCABULARY, "n_positions": 32}
    drops = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**shape, **drops, bos_token_id=0, eos_token_id=0))


def small(**changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {**shape, "intermediate_size": 40, "vocab_size": VOCABULARY, **drops, **changes}


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(**small(num_attention_heads=6, num_key_value_heads=2, head_dim=4), **QUIET)
    )


def t5() -> Any:
    shape = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 10, "d_ff": 40, "num_layers": 2}
    more = {"num_heads": 3, "feed_forward_proj": "gated-gelu", "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**shape, **more))


def modernbert() -> Any:
    special = {"cls_token_id": 0, "sep_token_id": 0, **QUIET}
    return ModernBertForMaskedLM(ModernBertConfig(**small(local_attention=6), **special))


def vit() -> Any:
    config = ViTConfig(**small(), image_size=8, patch_size=4, num_labels=5)
    return ViTForImageClassification(config)


FAMILIES = {
    "gpt2": Family(gpt2, ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")),
    "bert": Family(
        lambda: BertForMaskedLM(BertConfig(**small(), max_position_embeddings=32)),
        ("query", "value", "attention.output.dense", "intermediate.dense"),
    ),
    "llama": Family(llama, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj")),
    "modernbert": Family(modernbert, ("Wqkv", "attn.Wo", "Wi", "mlp.Wo")),
    "t5": Family(t5, ("q", "k", "v", "o", "wi_0", "wi_1", "wo"), "pairs"),
    "vit": Family(vit, ("q_proj", "v_proj", "o_proj", "fc1"), "images"),
}
