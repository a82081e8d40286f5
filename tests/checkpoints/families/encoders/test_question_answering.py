"""Start and end logits of question answering, in every family that has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
)

from manyheads import Ragged, lens, load, save
from manyheads.checkpoints.families.encoders.bert import BERT
from manyheads.errors import ConfigError
from manyheads.models.readout import SpanHead
from tests.checkpoints.families.encoders.test_bert import ROBERTA, SMALL
from tests.checkpoints.peer_models import assert_equal, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": 24,
    "n_layers": 1,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 40,
}
SPECIAL = {f"{name}_token_id": None for name in ("pad", "bos", "eos", "cls", "sep")}
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "roberta": RobertaConfig(**ROBERTA),
    "distilbert": DistilBertConfig(**DISTIL),
    "deberta-v2": DebertaV2Config(**SMALL, relative_attention=True, pos_att_type=["c2p"]),
    "modernbert": ModernBertConfig(**SMALL, **SPECIAL),
}


def logits(model: Any) -> list[torch.Tensor]:
    with torch.no_grad():
        result = [model(text[None]) for text in texts()]
    return [torch.stack((each.start_logits[0], each.end_logits[0]), dim=1) for each in result]


@pytest.mark.parametrize("name", CONFIGS)
def test_same_starts_and_ends_here_and_back(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    model = randomized(
        AutoModelForQuestionAnswering.from_config(config, attn_implementation="eager")
    )
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    assert isinstance(ours.config.readout, SpanHead)
    with torch.no_grad():
        assert_same(ours(Ragged.from_list(texts())).logits, logits(model))
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == name
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "ours").eval()
    assert_same(Ragged.from_list(logits(again)), logits(model))
    assert_equal(load(tmp_path / "ours"), ours)
    if name == "bert":
        assert len(lens.statistics(ours, texts(), progress=False)["entropy"].ranked()) == 6


def test_more_than_two_labels_are_refused() -> None:
    config = {"model_type": "bert", **SMALL, "architectures": ["BertForQuestionAnswering"]}
    with pytest.raises(ConfigError, match="num_labels=2"):
        BERT.read_config({**config, "num_labels": 3})
