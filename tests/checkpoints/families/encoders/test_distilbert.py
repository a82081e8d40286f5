"""DistilBERT folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DistilBertConfig,
    DistilBertModel,
)

from manyheads import Ragged, load, save
from manyheads.checkpoints.classification_head import with_classes
from manyheads.checkpoints.families.encoders.distilbert import DISTILBERT
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "dim": 24,
    "n_layers": 2,
    "n_heads": 3,
    "hidden_dim": 40,
    "max_position_embeddings": 40,
    "num_labels": 5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head, relu": {"n_heads": 1, "activation": "relu", "n_layers": 1},
    "untied": {"tie_word_embeddings": False, "dropout": 0.2, "attention_dropout": 0.0},
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def peer_model(head: str, name: str = "plain") -> Any:
    return randomized(HEADS[head].from_config(DistilBertConfig(**SMALL | CONFIGS[name])))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    check_decoder(peer_model(head, name), HEADS[head].from_pretrained, tmp_path)


def test_padded_texts_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model = peer_model("words")
    model.save_pretrained(tmp_path)
    batch = Ragged.from_list(texts())
    ids, mask = batch.to_padded(), batch.with_values(batch.values >= 0).to_padded()
    with torch.no_grad():
        ours: Any = load(tmp_path)
        result = ours(ids, mask).logits
        expected = model(ids, attention_mask=mask.long()).logits
    torch.testing.assert_close(result[mask], expected[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize("prefix", ["", "distilbert."])
def test_a_bare_model_loads_with_and_without_the_prefix(prefix: str, tmp_path: Path) -> None:
    model = randomized(DistilBertModel(DistilBertConfig(**SMALL)))
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(file).items()}, file)
    ours: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        states = [model(text[None]).last_hidden_state[0] for text in texts()]
        assert_same(ours(Ragged.from_list(texts())).hidden, states)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == "distilbert"
    AutoModel.from_pretrained(tmp_path / "ours")
    if not prefix:
        same_files(tmp_path / "theirs", tmp_path / "ours")
    assert_equal(load(tmp_path / "ours"), ours)


def test_new_classes_have_the_head_of_the_family(tmp_path: Path) -> None:
    peer_model("words").save_pretrained(tmp_path / "words")
    model = with_classes(load(tmp_path / "words"), ("glad", "sad"))
    assert save(model, tmp_path / "classes").family == "distilbert"
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classes").eval()
    assert again.config.id2label == {0: "glad", 1: "sad"}
    with torch.no_grad():
        expected = torch.stack([again(text[None]).logits[0] for text in texts()])
        result = model(Ragged.from_list(texts())).logits
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "selu"}, "activation='selu'"),
        ({"architectures": ["DistilBertForMultipleChoice"]}, "use one of DistilBertModel"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DISTILBERT.read_config({"model_type": "distilbert", **SMALL, **changes})
