"""Decoders with other heads than next words: classes of a text or of its tokens, or none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from manyheads import Ragged, build, load, save, with_classes
from manyheads.checkpoints.families.family import causal_readout
from manyheads.models import ClassHead, LanguageHead, NoReadout, TokenHead
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "num_labels": 3,
}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=3, n_positions=32, num_labels=3
    ),
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=5),
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("opener", "head"),
    [
        (AutoModelForSequenceClassification, ClassHead),
        (AutoModelForTokenClassification, TokenHead),
    ],
)
def test_classes_come_with_a_decoder_and_go_back(
    family: str, opener: Any, head: type, tmp_path: Path
) -> None:
    peer = randomized(opener.from_config(CONFIGS[family]))
    check_decoder(peer, opener.from_pretrained, tmp_path)
    assert isinstance(load(tmp_path / "ours").config.readout, head)


def three_words(third: str = "[PAD]") -> Tokenizer:
    return Tokenizer(WordLevel({"a": 0, "b": 1, third: 5}, unk_token="a"))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_padded_batch_of_two_is_classified_as_by_transformers(
    family: str, tmp_path: Path
) -> None:
    peer = randomized(AutoModelForSequenceClassification.from_config(CONFIGS[family]))
    peer.save_pretrained(tmp_path / "theirs")
    model: Any = load(tmp_path / "theirs")
    model.tokenizer = three_words()
    assert save(model, tmp_path / "ours").family == family
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    batch, seen = torch.tensor([[0, 1, 1], [1, 0, 5]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    with torch.no_grad():
        result = again(batch, attention_mask=seen).logits
        expected = model(Ragged.from_list([batch[0], batch[1, :2]])).logits
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    # Read once more it is still known.
    save(load(tmp_path / "ours"), tmp_path / "more")
    assert json.loads((tmp_path / "more" / "config.json").read_text())["pad_token_id"] == 5


def padding_saved(model: Any, folder: Path) -> int | None:
    save(model, folder)
    number: int | None = json.loads((folder / "config.json").read_text()).get("pad_token_id")
    return number


def test_a_padding_token_is_written_only_where_it_cannot_hide_a_text(tmp_path: Path) -> None:
    words: Any = build("gpt2", layers=1, width=16, heads=2, vocabulary=8, seed=0)
    words.tokenizer = three_words()
    assert padding_saved(words, tmp_path / "words") is None
    model: Any = with_classes(words, 3)
    assert padding_saved(model, tmp_path / "named") == 5
    model.tokenizer.post_processor = TemplateProcessing(
        single="$A [PAD]", special_tokens=[("[PAD]", 5)]
    )
    assert padding_saved(model, tmp_path / "ending") is None
    model.tokenizer = three_words("z")
    assert padding_saved(model, tmp_path / "nameless") is None
    model.generation = {"pad_token_id": 3}
    assert padding_saved(model, tmp_path / "model's own") == 3
    model.generation = {"pad_token_id": 8}
    assert padding_saved(model, tmp_path / "none of its words") is None


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_bare_decoder_gives_its_hidden_states(family: str, tmp_path: Path) -> None:
    peer = randomized(AutoModel.from_config(CONFIGS[family]))
    peer.save_pretrained(tmp_path / "theirs")
    sequences = texts()
    with torch.no_grad():
        expected = [peer(text[None]).last_hidden_state[0] for text in sequences]
        model: Any = load(tmp_path / "theirs")
        assert_same(model(Ragged.from_list(sequences)).hidden, expected)
    model.source_config = None  # our own words must do
    assert save(model, tmp_path / "ours").family == family
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        result = [again(text[None]).last_hidden_state[0] for text in sequences]
    assert_same(Ragged.from_list(result), expected)


def test_the_language_head_is_the_default() -> None:
    own, tied = LanguageHead(tied=False), LanguageHead(tied=True)
    assert causal_readout({}, own) == own
    assert causal_readout({"architectures": ["GPT2LMHeadModel"]}, own) == own
    assert causal_readout({"architectures": ["LlamaModel"]}, own) == NoReadout()
    assert causal_readout({"architectures": ["LlamaModel"]}, tied) == tied
