"""A small random decoder of any family, there and here: logits, padding, generation, files."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from manyheads import generate, load
from manyheads.cache import DynamicCache, StaticCache
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import TOLERANCE, texts

__all__ = ["check_family", "their_decoder"]

NEW_TOKENS = 12


def their_decoder(config: PreTrainedConfig, *, seed: int = 0) -> Any:
    """Their model, with weights at which a difference would show."""
    return randomized(
        AutoModelForCausalLM.from_config(config, attn_implementation="eager"), seed=seed
    )


def check_family(config: PreTrainedConfig, place: Path, *, generates: bool = True) -> Any:
    """Compare a decoder with theirs in every way that people use it; return ours."""
    peer = their_decoder(config)

    def opener(folder: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")

    check_decoder(peer, opener, place)
    ours: Any = load(place / "theirs")
    check_padding(peer, ours)
    if generates:
        check_generation(peer, ours)
    return ours


def check_padding(peer: Any, ours: Any) -> None:
    """A batch padded on the right gives the same logits there and here."""
    sequences = texts((9, 4))
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[9], [4]])
    with torch.no_grad():
        expected = peer(ids, attention_mask=mask.long()).logits
        result = ours(ids, mask).logits
    torch.testing.assert_close(result[mask], expected[mask], atol=TOLERANCE, rtol=0)


def check_generation(peer: Any, ours: Any) -> None:
    """The most likely tokens, with their cache and with ours of either kind."""
    prompts = texts((6, 3), seed=1)
    expected = [
        peer.generate(prompt[None], max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    assert len(expected[0]) == NEW_TOKENS
    for cache in (DynamicCache(), StaticCache(size=6 + NEW_TOKENS)):
        written = generate(
            ours,
            prompts,
            max_new_tokens=NEW_TOKENS,
            eos_token_ids=(),
            cache=cache,
            progress=False,
        )
        assert [list(each.ids) for each in written] == expected
