"""GGUF files of Gemma, and their tokenizer, that of SentencePiece."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import manyheads
from manyheads.checkpoints.gguf_file import GGUFFile
from manyheads.checkpoints.gguf_tokenizer import side_files_from
from tests.checkpoints.gguf_files import small, write
from tests.checkpoints.test_gguf_file import assert_equal

PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = ["▁t", "he", "▁the", "▁", "t", "h", "e", "c", "a", "ca", "▁ca", "▁cat", "▁▁"]


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    window: dict[str, Any] = {"attention.sliding_window": 4}
    if name == "gemma2":
        peer = small(
            transformers.Gemma2Config, head_dim=64, query_pre_attn_scalar=64, sliding_window=4
        )
        keys = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    else:
        peer = small(
            transformers.Gemma3TextConfig,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=4,
            num_hidden_layers=6,
        )
        keys = {"rope.freq_base": 1e6}
    file = write(tmp_path / "model.gguf", name, peer, metadata=window | keys)
    model = manyheads.load(file)
    assert model.native
    assert_equal(model, peer)


def metadata(architecture: str) -> dict[str, Any]:
    tokens = [*PIECES, *WORDS]
    scores = [0.0] * len(PIECES) + [-float(index) for index in range(len(WORDS))]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(WORDS),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tokenizer_of(content: dict[str, Any], tmp_path: Path) -> Any:
    from tokenizers import Tokenizer

    file = object.__new__(GGUFFile)
    file.file, file.metadata = tmp_path / "model.gguf", content
    files = side_files_from(file)
    assert json.loads(files["tokenizer_config.json"])["bos_token"] == "<s>"
    return Tokenizer.from_str(files["tokenizer.json"].decode())


def test_sentencepiece_merges_the_best_token_first(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(metadata("llama"), tmp_path)
    assert tokenizer.encode("the cat").tokens == ["<s>", "▁the", "▁cat"]
    # A letter that is no token becomes its bytes.
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    for text in ("the cat", "ça  va?", "the\ncat</s>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_gemma_has_no_space_before_a_text(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(metadata("gemma2"), tmp_path)
    assert tokenizer.encode("the  cat").tokens == ["<s>", "t", "he", "▁", "▁cat"]


def test_ends_are_added_as_the_file_has_them(tmp_path: Path) -> None:
    content = metadata("llama") | {
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
    }
    tokens = tokenizer_of(content, tmp_path).encode("the", "cat").tokens
    assert tokens == ["▁the", "</s>", "▁cat", "</s>"]


def test_the_sentencepiece_of_transformers_agrees(tmp_path: Path) -> None:
    ours = tokenizer_of(metadata("llama"), tmp_path)
    vocabulary = {token: index for index, token in enumerate([*PIECES, *WORDS])}
    model = json.loads(ours.to_str())["model"]
    peer = transformers.LlamaTokenizer(
        vocab=vocabulary, merges=[tuple(each) for each in model["merges"]]
    )
    torch.manual_seed(0)
    for _ in range(20):
        letters = torch.randint(0, 6, (12,)).tolist()
        text = "".join("the ca"[letter] for letter in letters).strip()
        assert peer(text, add_special_tokens=False)["input_ids"] == (
            ours.encode(text, add_special_tokens=False).ids
        )
