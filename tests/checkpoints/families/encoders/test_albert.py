"""ALBERT folders: shared layers, and token vectors narrower than the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    AlbertModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from manyheads import Ragged, lens, load, save, surgery
from manyheads.checkpoints.families.encoders.albert import ALBERT
from manyheads.errors import ConfigError, InputError
from manyheads.taps import Head
from tests.checkpoints.peer_models import check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "embedding_size": 10,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 80,
}
CONFIGS = {
    "one layer for all": AlbertConfig(**SMALL),
    "two groups of two, relu": AlbertConfig(
        **SMALL | {"embedding_size": 24},
        num_hidden_groups=2,
        inner_group_num=2,
        hidden_act="relu",
        num_labels=5,
    ),
    "all their own": AlbertConfig(**SMALL, num_hidden_groups=3, layer_norm_eps=1e-3),
}
OWNERS = {
    "one layer for all": (0, 0, 0),
    "two groups of two, relu": (0, 1, 0, 1, 4, 5),
    "all their own": (0, 1, 2),
}
HEADS = {"words": AutoModelForMaskedLM, "classes": AutoModelForSequenceClassification}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    peer = randomized(HEADS[head].from_config(CONFIGS[name], attn_implementation="eager"))
    check_decoder(peer, HEADS[head].from_pretrained, tmp_path)
    ours: Any = load(tmp_path / "ours")
    assert ours.config.stack.owners == OWNERS[name]


def test_other_heads(tmp_path: Path) -> None:
    config = CONFIGS["one layer for all"]
    tokens = randomized(AutoModelForTokenClassification.from_config(config))
    check_decoder(tokens, AutoModelForTokenClassification.from_pretrained, tmp_path / "tokens")
    bare, span = randomized(AlbertModel(config)), AutoModelForQuestionAnswering.from_config(config)
    pretrained = randomized(AlbertForPreTraining(config))
    for name, model in {"bare": bare, "span": randomized(span), "words": pretrained}.items():
        model.save_pretrained(tmp_path / name)
    batch = Ragged.from_list(texts())
    with torch.no_grad():
        ours: Any = load(tmp_path / "bare")
        assert_same(ours(batch).hidden, [bare(text[None])[0][0] for text in texts()])
        answers: Any = load(tmp_path / "span")
        starts = [span(text[None]).start_logits[0] for text in texts()]
        result = answers(batch).logits.values[:, 0]
        torch.testing.assert_close(result, torch.cat(starts), atol=1e-4, rtol=0)
        words: Any = load(tmp_path / "words")
        expected = [pretrained(text[None]).prediction_logits[0] for text in texts()]
        assert_same(words(batch).logits, expected)
    save(words, tmp_path / "again")
    same_files(tmp_path / "words", tmp_path / "again")


def test_the_lens_sees_every_depth(tmp_path: Path) -> None:
    peer = randomized(AutoModelForMaskedLM.from_config(CONFIGS["one layer for all"]))
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    ids = [text.tolist() for text in texts((9, 4))]
    result = lens.statistics(ours, ids, progress=False)
    assert len(result.addresses) == 3 * 4
    entropy = result["entropy"]
    assert entropy.of(Head(0, 0)) != entropy.of(Head(2, 0))
    scores = lens.score_circuits(ours, progress=False)
    assert len(scores.addresses) == 3 * 4
    memories = lens.key_value_memories(ours)
    assert memories is not None
    assert surgery.prune(ours, [Head(2, 0)]).config.stack.weights_of == "own"


def test_sizes_beyond_the_weights_are_refused_at_once(tmp_path: Path) -> None:
    AutoModelForMaskedLM.from_config(CONFIGS["one layer for all"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"inner_group_num": 10**8}))
    with pytest.raises(InputError, match="inner_group_num=100000000 is more than the weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_groups": 4}, "num_hidden_groups must be in 1 to num_hidden_layers=3"),
        ({"hidden_act": "selu"}, "hidden_act='selu'"),
        ({"architectures": ["AlbertForMultipleChoice"]}, "use one of AlbertModel"),
        ({"num_attention_heads": 5}, "heads must divide width=24"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ALBERT.read_config({"model_type": "albert", **SMALL, **changes})
