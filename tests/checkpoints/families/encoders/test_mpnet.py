"""MPNet folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    MPNetConfig,
    MPNetModel,
)

from manyheads import Ragged, load, save
from manyheads.checkpoints.families.encoders.mpnet import MPNET
from manyheads.errors import ConfigError
from tests.checkpoints import peer_models
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized, same_files
from tests.parity.comparing import LENGTHS, VOCABULARY, assert_same, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "num_labels": 5,
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def sequences(lengths: Sequence[int] = LENGTHS) -> list[torch.Tensor]:
    """Without the id of padding, whose position `transformers` does not count."""
    return [text.clamp(min=2) for text in texts(lengths)]


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("words", {}),
        ("words", {"tie_word_embeddings": False, "hidden_act": "relu"}),
        ("classes", {}),
        ("tokens", {}),
    ],
)
def test_same_logits_here_and_back(
    head: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_models, "texts", sequences)
    peer = randomized(HEADS[head].from_config(MPNetConfig(**SMALL | changes)))
    if head == "words":
        # An untied head has a second bias that is never read.
        peer.lm_head.bias.data.copy_(peer.lm_head.decoder.bias.data)
    check_decoder(peer, HEADS[head].from_pretrained, tmp_path)


def test_a_bare_model_with_its_pooler_and_long_texts(tmp_path: Path) -> None:
    model = randomized(MPNetModel(MPNetConfig(**SMALL | {"max_position_embeddings": 300})))
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    batch = sequences((7, 290, 1))
    with torch.no_grad():
        states = [model(text[None]).last_hidden_state[0] for text in batch]
        assert_same(ours(Ragged.from_list(batch)).hidden, states)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == "mpnet"
    AutoModel.from_pretrained(tmp_path / "ours")
    same_files(tmp_path / "theirs", tmp_path / "ours")
    assert_equal(load(tmp_path / "ours"), ours)


def test_spans_are_those_of_transformers(tmp_path: Path) -> None:
    config = MPNetConfig(**SMALL | {"num_labels": 2})
    peer = randomized(AutoModelForQuestionAnswering.from_config(config))
    peer.save_pretrained(tmp_path)
    [text] = sequences((12,))
    with torch.no_grad():
        answer = peer(text[None])
        result: Any = load(tmp_path)(Ragged.from_list([text])).logits
    expected = torch.stack([answer.start_logits[0], answer.end_logits[0]], dim=-1)
    assert_same(result, [expected])


def test_another_number_of_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="relative_attention_num_buckets=16"):
        MPNET.read_config({**SMALL, "relative_attention_num_buckets": 16})
