"""Small random models of `transformers` and the same weights here, and what theirs writes."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from manyheads import Generation, load
from tests.checkpoints.peer_models import randomized
from tests.parity.comparing import VOCABULARY

__all__ = ["DECODERS", "FAMILIES", "NEW", "SEQ2SEQS", "pair", "theirs_alone", "tokens"]

NEW = 24
DECODERS = ("gpt2", "llama", "mistral")
SEQ2SEQS = ("t5", "marian")
FAMILIES = (*DECODERS, *SEQ2SEQS)
LAST = VOCABULARY - 1


def _model(family: str) -> Any:
    eos = {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": LAST}
    rotary = {
        "vocab_size": VOCABULARY,
        "hidden_size": 28,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        **eos,
    }
    match family:
        case "gpt2":
            sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64}
            return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **eos))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**rotary))
        case "mistral":
            # Shorter than the prompts, so that the ring goes round.
            return MistralForCausalLM(MistralConfig(**rotary, sliding_window=5))
        case "t5":
            sizes = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
            ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
            return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, **sizes, **ids))
        case _:
            sides = {
                f"{side}_{name}": number
                for side in ("encoder", "decoder")
                for name, number in (("layers", 2), ("attention_heads", 3), ("ffn_dim", 40))
            }
            ids = {"decoder_start_token_id": LAST, "pad_token_id": LAST, "eos_token_id": 0}
            more = {"forced_eos_token_id": 0, "max_position_embeddings": 64}
            return MarianMTModel(
                MarianConfig(vocab_size=VOCABULARY, d_model=24, **sides, **ids, **more)
            )


@cache
def pair(family: str) -> tuple[Any, Any]:
    """Their model and ours, of the same weights; not to be changed."""
    with torch.random.fork_rng():
        peer = randomized(_model(family))
    if family == "marian":
        # The sinusoids are parameters there.
        for side in (peer.model.encoder, peer.model.decoder):
            side.embed_positions.weight.data.copy_(side.embed_positions.create_weight())
        peer.generation_config.bad_words_ids = [[LAST]]
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return peer, load(Path(folder))


def theirs_alone(peer: Any, prompts: Sequence[Sequence[int]], **more: Any) -> list[list[int]]:
    """The new tokens that they write, one prompt at a time and up to the first stop id."""
    return [_one(peer, prompt, **more) for prompt in prompts]


def _one(peer: Any, prompt: Sequence[int], **more: Any) -> list[int]:
    ids = torch.tensor([list(prompt)])
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1} | more
    result = peer.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
    before = 1 if peer.config.is_encoder_decoder else len(prompt)
    return result[before:]


def tokens(written: Sequence[Generation]) -> list[list[int]]:
    return [list(each.ids) for each in written]
