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
