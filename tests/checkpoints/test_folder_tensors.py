"""What the file of weights says and config.json does not: heads, and tensors nothing reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForPreTraining,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    LlamaConfig,
    MarianConfig,
    ModernBertConfig,
    RobertaConfig,
    RobertaModel,
    T5Config,
    ViTConfig,
    ViTModel,
)

from manyheads import Ragged, build, load, save
from manyheads.errors import InputError
from tests.checkpoints.peer_models import assert_equal, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

WEIGHTS = "model.safetensors"
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1}
TIED: dict[str, tuple[Any, Any, str]] = {
    "gpt2": (
        GPT2Config(vocab_size=VOCABULARY, n_embd=24, n_layer=1, n_head=3),
        AutoModelForCausalLM,
        "lm_head.weight",
    ),
    "llama": (
        LlamaConfig(**SMALL, tie_word_embeddings=True),
        AutoModelForCausalLM,
        "lm_head.weight",
    ),
    "modernbert": (
        ModernBertConfig(**SMALL, pad_token_id=0, cls_token_id=1, sep_token_id=2),
        AutoModelForMaskedLM,
        "decoder.weight",
    ),
    "marian": (
        MarianConfig(
            vocab_size=VOCABULARY,
            d_model=24,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=3,
            decoder_attention_heads=3,
            pad_token_id=0,
        ),
        AutoModelForSeq2SeqLM,
        "lm_head.weight",
    ),
    "t5, 1.0": (T5Config(**T5, num_heads=3), AutoModelForSeq2SeqLM, "lm_head.weight"),
    "t5, 1.1": (
        T5Config(**T5, num_heads=3, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
        AutoModelForSeq2SeqLM,
        "lm_head.weight",
    ),
}


def rewrite(place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(place / WEIGHTS))
    save_file(tensors, place / WEIGHTS, metadata={"format": "pt"})


def logits(model: Any) -> list[Tensor]:
    """One text after another, there or here."""
    with torch.no_grad():
        if getattr(model.config, "is_encoder_decoder", False):
            return [model(text[None], decoder_input_ids=text[None]).logits[0] for text in texts()]
        if hasattr(model.config, "decoder"):
            return [model(text[None], text[None]).logits[0] for text in texts()]
        return [model(text[None]).logits[0] for text in texts()]


def check(place: Path, opener: Any) -> Any:
    """The logits of transformers here, and there again when saved, in its words and in ours."""
    expected = logits(opener.from_pretrained(place, attn_implementation="eager").eval())
    for words in ("theirs", "ours"):
        model: Any = load(place)
        assert_same(Ragged.from_list(logits(model)), expected)
        model.source_config = model.source_config if words == "theirs" else None
        target = place.parent / words
        save(model, target)
        again = opener.from_pretrained(target, attn_implementation="eager").eval()
        for one, other in zip(logits(again), expected, strict=True):
            assert torch.equal(one, other)
        assert_equal(load(target), model)
    return load(place)


@pytest.mark.parametrize("name", ["gpt2", "llama", "modernbert", "t5, 1.0", "t5, 1.1"])
def test_a_head_that_differs_from_the_table_is_the_one_that_speaks(
    name: str, tmp_path: Path
) -> None:
    config, opener, head = TIED[name]
    randomized(opener.from_config(config)).save_pretrained(tmp_path / "file")
    own = 0.2 * torch.randn(VOCABULARY, 24, generator=torch.Generator().manual_seed(1))
    rewrite(tmp_path / "file", lambda old: old | {head: own})
    model = check(tmp_path / "file", opener)
    assert not model.config.readout.tied
    assert torch.equal(model.readout.weight, own)


@pytest.mark.parametrize("name", ["marian"])
def test_a_family_that_is_always_tied_refuses_another_head(name: str, tmp_path: Path) -> None:
    config, opener, head = TIED[name]
    randomized(opener.from_config(config)).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda old: old | {head: torch.randn(VOCABULARY, config.hidden_size)})
    with pytest.raises(InputError, match=r"lm_head\.weight is not part of the model"):
        load(tmp_path)


@pytest.mark.parametrize("name", TIED)
def test_a_file_without_a_head_has_a_tied_one(name: str, tmp_path: Path) -> None:
    config, opener, head = TIED[name]
    randomized(opener.from_config(config)).save_pretrained(tmp_path / "file")
    assert head not in load_file(tmp_path / "file" / WEIGHTS)
    assert check(tmp_path / "file", opener).config.readout.tied


CARRIED: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "roberta": lambda: RobertaModel(RobertaConfig(**SMALL)),
    "vit": lambda: ViTModel(
        ViTConfig(**SMALL, image_size=8, patch_size=4, pooler_output_size=10), use_mask_token=True
    ),
    "bert, pretraining": lambda: BertForPreTraining(BertConfig(**SMALL)),
}


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("words", ["theirs", "ours"])
def test_what_nothing_reads_is_written_back_bit_by_bit(
    words: str, name: str, tmp_path: Path
) -> None:
    peer = randomized(CARRIED[name]())
    peer.save_pretrained(tmp_path / "theirs")
    model: Any = load(tmp_path / "theirs")
    assert {"pooler.dense.weight", "pooler.dense.bias"} <= set(model.unread)
    assert not any("pooler" in key for key in model.state_dict())
    model.source_config = model.source_config if words == "theirs" else None
    save(model, tmp_path / "ours")
    same_files(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_the_pooler_gives_what_it_gave(name: str, tmp_path: Path) -> None:
    peer = randomized(CARRIED[name]())
    peer.save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    for text in texts():
        with torch.no_grad():
            one, other = (each(text[None]).pooler_output for each in (peer, again))
        assert torch.equal(one, other)


def test_the_pooler_of_images_gives_what_it_gave(tmp_path: Path) -> None:
    peer = randomized(CARRIED["vit"]())
    peer.save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    images = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(peer(images).pooler_output, again(images).pooler_output)


def test_a_pooler_behind_another_head_bears_the_prefix(tmp_path: Path) -> None:
    peer = BertForTokenClassification(BertConfig(**SMALL))
    randomized(peer).save_pretrained(tmp_path / "theirs")
    pooler = {f"bert.pooler.dense.{kind}": torch.randn(24, 24) for kind in ("weight", "bias")}
    rewrite(tmp_path / "theirs", lambda old: old | pooler)
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    same_files(tmp_path / "theirs", tmp_path / "ours")


def test_what_nothing_reads_takes_the_type_of_the_rest(tmp_path: Path) -> None:
    randomized(CARRIED["bert"]()).save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs", dtype=torch.bfloat16), tmp_path / "ours")
    kinds = {tensor.dtype for tensor in load_file(tmp_path / "ours" / WEIGHTS).values()}
    assert kinds == {torch.bfloat16}


def test_a_model_without_a_counterpart_leaves_it_behind(tmp_path: Path) -> None:
    randomized(CARRIED["bert"]()).save_pretrained(tmp_path / "theirs")
    other: Any = build("tiny-encoder", seed=0)
    other.unread = load(tmp_path / "theirs").unread
    save(other, tmp_path / "ours")
    assert load_file(tmp_path / "ours" / WEIGHTS).keys() == other.state_dict().keys()
