"""Decoders with other heads than next words: classes of a text or of its tokens, or none."""

from pathlib import Path
from typing import Any

import pytest
import torch
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

from manyheads import ClassHead, LanguageHead, NoReadout, Ragged, TokenHead, load, save
from manyheads.checkpoints.causal_heads import head_of
from tests.checkpoints.theirs import check_decoder, randomised
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
    theirs = randomised(opener.from_config(CONFIGS[family]))
    check_decoder(theirs, opener.from_pretrained, tmp_path)
    assert isinstance(load(tmp_path / "ours").config.readout, head)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_bare_decoder_gives_its_hidden_states(family: str, tmp_path: Path) -> None:
    theirs = randomised(AutoModel.from_config(CONFIGS[family]))
    theirs.save_pretrained(tmp_path / "theirs")
    sequences = texts()
    with torch.no_grad():
        expected = [theirs(text[None]).last_hidden_state[0] for text in sequences]
        model: Any = load(tmp_path / "theirs")
        assert_same(model(Ragged.from_list(sequences)).hidden, expected)
    model.described = None  # our own words must do
    assert save(model, tmp_path / "ours").family == family
    again = AutoModel.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        found = [again(text[None]).last_hidden_state[0] for text in sequences]
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_words_are_named_unless_another_head_is_asked_for() -> None:
    own, tied = LanguageHead(tied=False), LanguageHead(tied=True)
    assert head_of({}, own) == own
    assert head_of({"architectures": ["GPT2LMHeadModel"]}, own) == own
    assert head_of({"architectures": ["LlamaModel"]}, own) == NoReadout()
    assert head_of({"architectures": ["LlamaModel"]}, tied) == tied
