"""TransformerLens at the same shape, if it is installed."""

from collections.abc import Sequence
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
from side_by_side import Work
from torch import Tensor

from manyheads.checkpoints.folder import save
from manyheads.models.decoder import Decoder
from manyheads.taps import Head

__all__ = ["cached_run", "hooked_loop"]


def cached_run(tokens: int) -> Work:
    """GPT-2 small's shape with random weights; the cache holds every pattern of every head."""
    transformers: Any = import_module("transformers")
    bridge: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    config = transformers.GPT2Config(n_positions=tokens, attn_implementation="eager")
    peer = transformers.GPT2LMHeadModel(config).eval()
    model = bridge.boot_transformers("gpt2", hf_model=peer, tokenizer=_tokenizer(transformers))
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


def hooked_loop(model: Decoder, batch: Tensor, heads: Sequence[Head]) -> Work:
    """The loss without each head of a GPT-2, its weights ours: a run with a hook for every head."""
    transformers: Any = import_module("transformers")
    bridge: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    with TemporaryDirectory() as folder:
        save(model, folder)
        peer = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager")
    names = _tokenizer(transformers)
    hooked = bridge.boot_transformers("gpt2", hf_model=peer.eval(), tokenizer=names)

    def without(head: Head) -> Tensor:
        def silence(spoken: Tensor, hook: Any) -> Tensor:  # noqa: ARG001, they call it by name
            spoken[:, :, head.head] = 0
            return spoken

        site = f"blocks.{head.layer}.attn.hook_z"
        return hooked.run_with_hooks(batch, return_type="loss", fwd_hooks=[(site, silence)])

    def work() -> Tensor:
        with torch.no_grad():
            return torch.stack([without(head) for head in heads])

    return work


def _tokenizer(transformers: Any) -> Any:
    """It wants one and reads nothing with it here; the real one would come over the network."""
    tokenizers: Any = import_module("tokenizers")
    end = "<|endoftext|>"
    words = tokenizers.models.WordLevel({end: 0}, unk_token=end)
    # With a BOS token it would be downloaded again by name.
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token=end, unk_token=end
    )
