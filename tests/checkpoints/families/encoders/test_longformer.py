"""Longformer folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LongformerConfig,
    LongformerModel,
)

from manyheads import Ragged, load, save
from manyheads.checkpoints.families.encoders.longformer import LONGFORMER
from manyheads.errors import ConfigError, InputError
from manyheads.mixers import global_tokens
from tests.checkpoints.peer_models import check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

# As in RoBERTa, padding has no position, and a text has none.
UNUSED = min(set(range(1, VOCABULARY)) - set(torch.cat(texts()).tolist()))
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 180,
    "pad_token_id": UNUSED,
    "attention_window": [4, 8],
}
CONFIGS = {
    "two windows": LongformerConfig(**SMALL, num_labels=6),
    "one window, relu": LongformerConfig(
        **SMALL | {"attention_window": 6}, hidden_act="relu", type_vocab_size=1, num_labels=5
    ),
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def marked(text: Tensor, positions: list[int]) -> Tensor:
    return torch.zeros_like(text).index_fill(0, torch.tensor(positions).long(), 1)[None]


@pytest.mark.parametrize(
    ("name", "head"),
    [("two windows", head) for head in HEADS] + [("one window, relu", "words")],
)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    peer = randomized(HEADS[head].from_config(CONFIGS[name]))
    check_decoder(peer, HEADS[head].from_pretrained, tmp_path)


def test_global_tokens_of_each_text_are_those_of_transformers(tmp_path: Path) -> None:
    peer = randomized(LongformerModel(CONFIGS["two windows"]))
    peer.save_pretrained(tmp_path / "theirs")
    model: Any = load(tmp_path / "theirs")
    lengths = (23, 100, 2, 40)
    places = [[0, 5, 22], [99, 1, 50, 51], [1], []]
    sequences = [text.masked_fill(text == UNUSED, 0) for text in texts(lengths)]
    with torch.no_grad(), global_tokens(model, places):
        result = model(Ragged.from_list(sequences)).hidden
    with torch.no_grad():
        expected = [
            peer(text[None], global_attention_mask=marked(text, some)).last_hidden_state[0]
            for text, some in zip(sequences, places, strict=True)
        ]
        alone = [peer(text[None]).last_hidden_state[0] for text in sequences]
        assert_same(model(Ragged.from_list(sequences)).hidden, alone)
    assert_same(result, expected)
    model.source_config = None
    assert save(model, tmp_path / "ours").family == "longformer"
    same_files(tmp_path / "theirs", tmp_path / "ours")


def test_answers_need_to_know_the_question(tmp_path: Path) -> None:
    config = LongformerConfig(**SMALL, sep_token_id=5)
    peer = randomized(AutoModelForQuestionAnswering.from_config(config))
    peer.save_pretrained(tmp_path)
    model: Any = load(tmp_path)
    text = torch.tensor([0, 7, 8, 9, 5, 5, 11, 12, 13, 14, 15, 16, 5])
    batch = Ragged.from_list([text])
    with pytest.raises(InputError, match=r"with global_tokens\(model"):
        model(batch)
    with pytest.raises(InputError, match="2 texts, and the batch has 1"):  # noqa: SIM117
        with global_tokens(model, [[0], [1]]):
            model(batch)
    with torch.no_grad(), global_tokens(model, [range(4)]):
        result = model(batch).logits.values[:, 0]
    expected = peer(text[None]).start_logits[0]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_window": 5}, "attention_window must be even and above 0, got 5"),
        ({"attention_window": [4]}, "one window per layer"),
        ({"pad_token_id": None}, "pad_token_id=None"),
        ({"architectures": ["LongformerForMultipleChoice"]}, "use one of LongformerModel"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LONGFORMER.read_config({"model_type": "longformer", **SMALL, **changes})
