"""GGUF files, against `transformers` models with the same dequantized weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import manyheads
from manyheads.checkpoints.gguf_tokenizer import SPLITS
from manyheads.errors import InputError, UnknownTokenizerWarning, WrappedModelWarning
from tests.checkpoints.gguf_files import TYPES, small, write

IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])


def assert_equal(model: Any, peer: Any) -> None:
    with torch.no_grad():
        ours, expected = model(IDS).logits, peer(IDS).logits
    torch.testing.assert_close(ours, expected, atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def llama() -> Any:
    return small(transformers.LlamaConfig, head_dim=64, tie_word_embeddings=False)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_logits_equal_the_dequantized_model(kind: str, llama: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", llama, getattr(TYPES, kind))
    model = manyheads.load(file, dtype=torch.float32)
    assert_equal(model, llama)
    halves = {"F16": torch.float16, "BF16": torch.bfloat16}
    own = halves.get(kind, torch.float32)
    assert next(manyheads.load(file).parameters()).dtype == own


def test_tied_heads_and_the_families_of_qwen(tmp_path: Path) -> None:
    for name, config in (("qwen2", transformers.Qwen2Config), ("qwen3", transformers.Qwen3Config)):
        peer = small(config, head_dim=64, tie_word_embeddings=True)
        file = write(tmp_path / f"{name}.gguf", name, peer, TYPES.Q8_0)
        model = manyheads.load(file)
        assert_equal(model, peer)
        assert model.source_config["tie_word_embeddings"] is True


def test_rotary_scalings_are_read(tmp_path: Path) -> None:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    peer = small(transformers.LlamaConfig, head_dim=64, rope_parameters=llama3)
    frequencies = 1e4 ** (-torch.arange(0, 64, 2) / 64)
    factors = (frequencies / peer.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert len(set(factors.round(3).tolist())) > 3
    file = write(
        tmp_path / "a.gguf",
        "llama",
        peer,
        metadata={"rope.freq_base": 1e4},
        tensors={"rope_freqs.weight": factors},
    )
    model = manyheads.load(file)
    assert_equal(model, peer)
    assert model.source_config["rope_parameters"] == llama3

    linear = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
    peer = small(transformers.LlamaConfig, head_dim=64, rope_parameters=linear)
    keys = {"rope.freq_base": 5e4, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert_equal(manyheads.load(write(tmp_path / "b.gguf", "llama", peer, metadata=keys)), peer)


def test_it_is_saved_as_a_folder_that_transformers_opens(llama: Any, tmp_path: Path) -> None:
    model = manyheads.load(write(tmp_path / "model.gguf", "llama", llama, TYPES.Q4_0))
    manyheads.save(model, tmp_path / "folder")
    again = manyheads.load(tmp_path / "folder")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder").eval()
    assert_equal(again, peer)
    assert_equal(model, peer)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    text = "hello he 12\nhell<|turn|>"
    assert tokenizer(text)["input_ids"] == model.tokenizer.encode(text).ids
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.apply_chat_template([{"content": "he"}], tokenize=False) == "<|turn|>he"
    assert json.loads((tmp_path / "folder/generation_config.json").read_text())["eos_token_id"]


def test_the_tokenizer_follows_its_rule(llama: Any, tmp_path: Path) -> None:
    tokenizer = manyheads.load(write(tmp_path / "model.gguf", "llama", llama)).tokenizer
    assert tokenizer.encode("hello hello12").tokens == ["hello", "Ġ", "hello", "1", "2"]
    assert tokenizer.encode("he<|turn|>").tokens == ["he", "<|turn|>"]
    assert tokenizer.decode(tokenizer.encode("hell o he12").ids) == "hell o he12"


@pytest.mark.parametrize("rule", ["llama-bpe", "qwen2", "tekken"])
def test_texts_are_split_as_by_transformers(rule: str) -> None:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    text = "It's 12345 o'clock,  HTTPServer é\n\n\tx+=1; WE'LL 你好… (a)/b \r\n end "
    ours, peer = (
        Split(Regex(table[rule]), behavior="isolated").pre_tokenize_str(text)
        for table in (SPLITS, GGUF_PRE_TOKENIZER_SPLITS)
    )
    assert ours == peer


def test_an_unknown_rule_of_a_tokenizer_leaves_the_model_without_one(
    llama: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", "llama", llama)
    file.write_bytes(file.read_bytes().replace(b"smollm", b"smallm"))
    with pytest.warns(UnknownTokenizerWarning, match="smallm"):
        assert manyheads.load(file).tokenizer is None


def test_uneven_layers_are_read(tmp_path: Path) -> None:
    peer = small(transformers.LlamaConfig, head_dim=64, intermediate_size=512)
    for name in ("gate", "up", "down"):
        part = getattr(peer.model.layers[1].mlp, f"{name}_proj")
        rows = part.weight.detach()
        part.weight = torch.nn.Parameter(rows[:, :256] if name == "down" else rows[:256])
    uneven = {"feed_forward_length": [512, 256]}
    model = manyheads.load(write(tmp_path / "model.gguf", "llama", peer, metadata=uneven))
    assert_equal(model, peer)
    assert model.source_config["per_layer_config"] == {"1": {"intermediate_size": 256}}


def test_other_architectures_are_opened_by_transformers(tmp_path: Path) -> None:
    # Its default padding token is 32,000.
    peer = small(transformers.Phi3Config, vocab_size=32064, hidden_size=32, intermediate_size=32)
    peer.config.head_dim = 8
    keys = {"rope.dimension_count": 8, "vocab_size": 32064}
    file = write(tmp_path / "model.gguf", "phi3", peer, metadata=keys)
    with pytest.warns(WrappedModelWarning, match="phi3"):
        model = manyheads.load(file)
    assert not model.native
    assert_equal(model, peer)
    assert model.tokenizer.encode("hello").tokens == ["hello"]


def damaged(data: bytes, what: str) -> bytes:
    if what == "truncated":
        return data[:-1000]
    if what == "header":
        return data[:200]
    if what == "magic":
        return b"GGML" + data[4:]
    if what == "counts":
        return data[:8] + (2**62).to_bytes(8, "little") + data[16:]
    if what == "version":
        return data[:4] + (9).to_bytes(4, "little") + data[8:]
    if what == "architecture":
        return data.replace(b"llama", b"lhama")
    if what == "empty":
        return b""
    # The type of the first tensor, after its name, the number of its sizes, and these.
    start = data.index(b"token_embd.weight") + 17 + 4 + 16
    assert data[start] == 0
    number = 99 if what == "unknown type" else 24
    return data[:start] + bytes([number]) + data[start + 1 :]


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("truncated", "truncated.*again"),
        ("header", "model.gguf.*again"),
        ("magic", "not a GGUF"),
        ("counts", "4,611,686,018,427,387,904.*again"),
        ("version", "version 9"),
        ("architecture", "lhama"),
        ("empty", "model.gguf"),
        ("unknown type", "99.*Q4_K"),
        ("integers", "I8.*Q4_K"),
    ],
)
def test_damaged_files_are_refused(what: str, match: str, llama: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "model.gguf", "llama", llama)
    file.write_bytes(damaged(file.read_bytes(), what))
    with pytest.raises(InputError, match=match) as caught:
        manyheads.load(file)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"vocab_size": 65}, "vocab_size=65.*64 rows"),
        ({"rope.dimension_count": 32}, "rotates 32"),
        ({"expert_count": 8}, "8 experts"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    metadata: dict[str, Any], match: str, llama: Any, tmp_path: Path
) -> None:
    file = write(tmp_path / "model.gguf", "llama", llama, metadata=metadata)
    with pytest.raises(InputError, match=match):
        manyheads.load(file)


def test_sizes_that_do_not_fit_the_tensors_are_named(llama: Any, tmp_path: Path) -> None:
    extra = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    file = write(tmp_path / "model.gguf", "llama", llama, tensors=extra)
    with pytest.raises(InputError, match=r"blk\.0\.attn_sinks\.weight"):
        manyheads.load(file)
    peer = small(transformers.LlamaConfig, head_dim=64)
    peer.config.intermediate_size = 128
    file = write(tmp_path / "other.gguf", "llama", peer)
    with pytest.raises(InputError, match=r"blk\.0\.ffn_down\.weight has shape \(256, 256\)"):
        manyheads.load(file)
