"""The Reformer with local and LSH layers equals that of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ReformerConfig, ReformerModelWithLMHead
from transformers.utils import logging

from manyheads import generate, load
from manyheads.errors import InputError
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 6,
    "feed_forward_size": 20,
    "attn_layers": ["local", "lsh", "lsh"],
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [6, 10],
    "max_position_embeddings": 32,
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 4,
    "hash_seed": 5,
    "is_decoder": True,
    "eos_token_id": None,
}


def their_reformer(**changes: Any) -> Any:
    logging.set_verbosity_error()
    return randomized(ReformerModelWithLMHead(ReformerConfig(**SMALL | changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hashes": 3},
        {"num_buckets": [2, 4], "num_hashes": 2, "lsh_attn_chunk_length": 8, "hidden_act": "gelu"},
        {"lsh_num_chunks_before": 2, "local_num_chunks_before": 0, "local_attn_chunk_length": 6},
        {"attn_layers": ["local"], "axial_pos_embds": False, "num_attention_heads": 3},
    ],
)
def test_it_equals_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    check_decoder(their_reformer(**changes), ReformerModelWithLMHead.from_pretrained, tmp_path)


def test_buckets_by_length_equal_those_that_they_choose(tmp_path: Path) -> None:
    peer = their_reformer(num_buckets=None, num_hashes=2)
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    [text] = texts((23,))
    with torch.no_grad():
        expected = peer(text[None]).logits
        torch.testing.assert_close(ours(text[None]).logits, expected, atol=1e-4, rtol=0)


def test_generation_equals_transformers_while_one_chunk_holds_the_text(tmp_path: Path) -> None:
    peer = their_reformer(lsh_attn_chunk_length=32, local_attn_chunk_length=32)
    peer.save_pretrained(tmp_path)
    prompts = texts((6, 3))
    expected = [
        peer.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    made = generate(load(tmp_path), prompts, max_new_tokens=8, eos_token_ids=(), progress=False)
    assert [list(each.ids) for each in made] == expected


@torch.no_grad()
@pytest.mark.parametrize("hashes", [1, 3])
def test_a_step_gives_the_full_pass_where_that_of_transformers_does_not(
    hashes: int, tmp_path: Path
) -> None:
    """One LSH layer: what it saw before is no input of another layer."""
    peer = their_reformer(attn_layers=["lsh"], num_hashes=hashes)
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    [text] = texts((24,), seed=4)
    step = peer(text[None, :6], use_cache=True)
    cache = ours.new_cache()
    ours(text[None, :6], cache=cache)
    off = []
    for index in range(6, 24):
        expected = peer(text[None, : index + 1]).logits[0, -1]
        result = ours(text[None, index : index + 1], cache=cache).logits[0, -1]
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
        step = peer(
            text[None, index : index + 1],
            use_cache=True,
            past_buckets_states=step.past_buckets_states,
        )
        off.append((step.logits[0, -1] - expected).abs().max() / expected.abs().max())
    assert max(off) > 0.03


@torch.no_grad()
def test_steps_give_the_full_pass_while_one_chunk_holds_the_text(tmp_path: Path) -> None:
    their_reformer(lsh_attn_chunk_length=32).save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    [text] = texts((24,), seed=4)
    cache = ours.new_cache()
    steps = [ours(piece[None], cache=cache).logits[0] for piece in text.split([6, 1, 3, 1, 13])]
    full = ours(text[None]).logits[0]
    torch.testing.assert_close(torch.cat(steps), full, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("is_decoder", False, "is_decoder"),
        ("attn_layers", ["local", "global"], "global"),
        ("lsh_num_chunks_after", 1, "lsh_num_chunks_after.*1"),
        ("num_buckets", 3, "buckets.*3"),
        ("axial_pos_embds_dim", [6, 6], "16"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
    ],
)
def test_what_is_not_supported_is_refused(key: str, value: Any, named: str, tmp_path: Path) -> None:
    their_reformer().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(InputError, match=named):
        load(tmp_path)
