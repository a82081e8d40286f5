"""Texts that grow past the original length of rotary positions that depend on it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig

from manyheads import Ragged, generate, load
from tests.parity.comparing import VOCABULARY, assert_same, texts
from tests.parity.families import their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ORIGINAL, NEW = 10, 12
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 4.0, 8.0, 16.0],
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}


def dynamic() -> LlamaConfig:
    return LlamaConfig(**SMALL, max_position_embeddings=ORIGINAL, rope_parameters=DYNAMIC)


def longrope(kind: type[PreTrainedConfig], **more: Any) -> PreTrainedConfig:
    return kind(**SMALL, max_position_embeddings=40, rope_parameters=LONG, **more)


def saved(config: PreTrainedConfig, folder: Path) -> tuple[Any, Any]:
    peer = their_decoder(config)
    peer.save_pretrained(folder)
    return peer, load(folder)


def written(ours: Any, prompt: Tensor) -> list[int]:
    [text] = generate(ours, [prompt], max_new_tokens=NEW, eos_token_ids=(), progress=False)
    return list(text.ids)


def written_without_cache(ours: Any, prompt: Tensor) -> list[int]:
    text = prompt
    with torch.no_grad():
        for _ in range(NEW):
            logits = ours(Ragged.from_list([text])).logits.values[-1]
            text = torch.cat([text, logits.argmax()[None]])
    return text[len(prompt) :].tolist()


def written_by_peer(peer: Any, prompt: Tensor) -> list[int]:
    text = peer.generate(prompt[None], max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    ids: list[int] = text[0, len(prompt) :].tolist()
    return ids


@pytest.mark.parametrize(
    "config",
    [longrope(LlamaConfig), longrope(Phi3Config, original_max_position_embeddings=ORIGINAL)],
    ids=["llama", "phi3"],
)
def test_longrope_writes_what_full_passes_give(config: PreTrainedConfig, tmp_path: Path) -> None:
    """Phi-3 of `transformers` also starts a new cache; its other families keep the old keys."""
    peer, ours = saved(config, tmp_path)
    [prompt] = texts((6,), seed=1)
    result = written(ours, prompt)
    assert result == written_without_cache(ours, prompt)
    assert (result == written_by_peer(peer, prompt)) == isinstance(config, Phi3Config)


def test_steps_with_dynamic_scaling_are_those_of_transformers(tmp_path: Path) -> None:
    """Keys in a cache keep their rotation, there and here, so a full pass differs."""
    peer, ours = saved(dynamic(), tmp_path)
    [text] = texts((20,), seed=2)
    cache = ours.new_cache()
    with torch.no_grad():
        step = peer(text[None, :6], use_cache=True)
        ours(text[None, :6], cache=cache)
        for index in range(6, 20):
            new, place = text[None, index : index + 1], torch.tensor([[index]])
            step = peer(new, past_key_values=step.past_key_values, position_ids=place)
            assert_same(ours(new, cache=cache).logits, [step.logits[0]])
            full = ours(text[None, : index + 1]).logits[0, -1]
            near = torch.allclose(step.logits[0, -1], full, atol=1e-4)
            assert near == (index < ORIGINAL)
    assert written(ours, text[:6]) == written_by_peer(their_decoder(dynamic()), text[:6])


def test_dynamic_scaling_forgets_longer_texts_of_the_past(tmp_path: Path) -> None:
    """Theirs keeps the scaling of the longest text until one fits the original length."""
    peer, ours = saved(dynamic(), tmp_path)
    longer, text = texts((30, 14), seed=3)
    with torch.no_grad():
        expected = [peer(text[None]).logits[0]]
        ours(Ragged.from_list([longer]))
        assert_same(ours(Ragged.from_list([text])).logits, expected)
        peer(longer[None])
        assert (peer(text[None]).logits[0] - expected[0]).abs().max() > 1e-2
