"""The peer that looks inside: TransformerLens, at the same shape, where it is installed."""

from importlib import import_module
from typing import Any

import torch
from side_by_side import Work
from torch import Tensor

__all__ = ["cached_run"]


def cached_run(tokens: int) -> Work:
    """GPT-2 small's shape with random weights; the cache holds every pattern of every head."""
    transformers: Any = import_module("transformers")
    bridge: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    config = transformers.GPT2Config(n_positions=tokens, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(config).eval()
    model = bridge.boot_transformers("gpt2", hf_model=theirs, tokenizer=_tokenizer(transformers))
    text = torch.randint(50257, (1, tokens), generator=torch.Generator().manual_seed(0))

    def work() -> Tensor:
        with torch.inference_mode():
            _, cache = model.run_with_cache(text)
            means = []
            for layer in range(config.n_layer):
                for head in cache["pattern", layer][0]:
                    means.append(torch.special.entr(head).sum(-1).mean())
        return torch.stack(means)

    return work


def _tokenizer(transformers: Any) -> Any:
    """It wants one and reads nothing with it here; the real one would come over the network."""
    tokenizers: Any = import_module("tokenizers")
    end = "<|endoftext|>"
    words = tokenizers.models.WordLevel({end: 0}, unk_token=end)
    # With a first token it would be fetched anew by name.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token=end, unk_token=end
    )
