"""BERT and RoBERTa folders."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    BertForPreTraining,
    BertModel,
    RobertaConfig,
    RobertaModel,
)

from manyheads import Ragged, build, load, save
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.families.encoders.bert import BERT
from manyheads.errors import ConfigError, InputError
from tests.checkpoints.peer_models import check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 80,
}
# RoBERTa skips padding when it counts positions, and a text has none.
UNUSED = min(set(range(1, VOCABULARY)) - set(torch.cat(texts()).tolist()))
ROBERTA = SMALL | {"type_vocab_size": 1, "pad_token_id": UNUSED}
CONFIGS = {
    "bert": BertConfig(**SMALL),
    "bert, one head, relu": BertConfig(
        **SMALL | {"num_attention_heads": 1}, hidden_act="relu", num_labels=5
    ),
    "bert, new gelu, large eps": BertConfig(
        **SMALL, hidden_act="gelu_new", layer_norm_eps=1e-3, num_labels=7, type_vocab_size=4
    ),
    "roberta": RobertaConfig(**ROBERTA, num_labels=6),
    "roberta, relu": RobertaConfig(**ROBERTA, hidden_act="relu", num_labels=5),
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}
BARE = {"bert": BertModel, "roberta": RobertaModel}


def made(auto: Any, config: Any) -> Any:
    return randomized(auto.from_config(config, attn_implementation="eager"))


def states(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(text[None]).last_hidden_state[0] for text in texts()]


def rewrite(place: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = change(load_file(place / "model.safetensors"))
    save_file(tensors, place / "model.safetensors")


def assert_loads_the_same(place: Path, expected: dict[str, Tensor]) -> None:
    result = load(place).state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    check_decoder(made(HEADS[head], CONFIGS[name]), HEADS[head].from_pretrained, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_states_of_a_bare_model_here_and_back(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    peer = randomized(BARE[config.model_type](config, add_pooling_layer=False))
    peer.save_pretrained(tmp_path / "theirs")
    model: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        assert_same(model(Ragged.from_list(texts())).hidden, states(peer))
    model.source_config = None  # our own words must do
    assert save(model, tmp_path / "ours").family == config.model_type
    again = AutoModel.from_pretrained(tmp_path / "ours", add_pooling_layer=False).eval()
    assert_same(Ragged.from_list(states(again)), states(peer))
    same_files(tmp_path / "theirs", tmp_path / "ours")
    assert_loads_the_same(tmp_path / "ours", model.state_dict())


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_an_untied_head_has_a_table_of_its_own(name: str, tmp_path: Path) -> None:
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict() | {"tie_word_embeddings": False})
    peer = made(AutoModelForMaskedLM, config)
    head = peer.cls.predictions if name == "bert" else peer.lm_head
    with torch.no_grad():
        head.bias.copy_(head.decoder.bias)
    check_decoder(peer, AutoModelForMaskedLM.from_pretrained, tmp_path)


def test_types_of_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    peer = made(AutoModelForSequenceClassification, CONFIGS["bert, one head, relu"])
    peer.save_pretrained(tmp_path)
    kinds = [(torch.arange(len(text)) > len(text) // 2).long() for text in texts()]
    model: Any = load(tmp_path)
    with torch.no_grad():
        result = model(Ragged.from_list(texts()), types=Ragged.from_list(kinds)).logits
        expected = [
            peer(text[None], token_type_ids=kind[None]).logits[0]
            for text, kind in zip(texts(), kinds, strict=True)
        ]
    assert_same(result, expected)


@pytest.mark.parametrize("family", BARE)
def test_nothing_reads_the_pooler_of_a_bare_model(family: str, tmp_path: Path) -> None:
    peer = randomized(BARE[family](CONFIGS[family]))
    peer.save_pretrained(tmp_path)
    assert "pooler.dense.weight" in load_file(tmp_path / "model.safetensors")
    model: Any = load(tmp_path)
    assert not any("transform" in name for name in model.state_dict())
    with torch.no_grad():
        assert_same(model(Ragged.from_list(texts())).hidden, states(peer))


@pytest.mark.parametrize("family", BARE)
def test_a_bare_model_loads_with_the_prefix_too(family: str, tmp_path: Path) -> None:
    randomized(BARE[family](CONFIGS[family])).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    rewrite(tmp_path, lambda old: {f"{family}.{name}": old[name] for name in old})
    assert_loads_the_same(tmp_path, expected)


def test_classes_of_tokens_load_with_a_pooler_that_nothing_reads(tmp_path: Path) -> None:
    made(AutoModelForTokenClassification, CONFIGS["bert"]).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    pooler = {
        "bert.pooler.dense.weight": torch.zeros(24, 24),
        "bert.pooler.dense.bias": torch.zeros(24),
    }
    rewrite(tmp_path, lambda old: old | pooler)
    assert_loads_the_same(tmp_path, expected)


@pytest.mark.parametrize("family", BARE)
def test_words_load_without_the_prefix_too(family: str, tmp_path: Path) -> None:
    made(AutoModelForMaskedLM, CONFIGS[family]).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    rewrite(tmp_path, lambda old: {name.removeprefix(f"{family}."): old[name] for name in old})
    assert_loads_the_same(tmp_path, expected)


def test_gamma_and_beta_are_the_older_names_of_a_norm(tmp_path: Path) -> None:
    made(AutoModelForMaskedLM, CONFIGS["bert"]).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()

    def older(name: str) -> str:
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        return old.replace("LayerNorm.bias", "LayerNorm.beta")

    rewrite(tmp_path, lambda old: {older(name): old[name] for name in old})
    assert "bert.embeddings.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
    assert_loads_the_same(tmp_path, expected)


@pytest.mark.parametrize(
    ("family", "head"), [("bert", "cls.predictions.decoder"), ("roberta", "lm_head.decoder")]
)
def test_buffers_and_tied_copies_are_skipped(family: str, head: str, tmp_path: Path) -> None:
    made(AutoModelForMaskedLM, CONFIGS[family]).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    table = expected["embedding.tokens.weight"]
    rewrite(
        tmp_path,
        lambda old: (
            old
            | {
                f"{family}.embeddings.position_ids": torch.arange(80)[None],
                f"{head}.weight": table.clone(),
                f"{head}.bias": expected["readout.bias"].clone(),
                f"{family}.pooler.dense.weight": torch.zeros(24, 24),
                f"{family}.pooler.dense.bias": torch.zeros(24),
            }
        ),
    )
    assert_loads_the_same(tmp_path, expected)


def test_words_of_a_pretrained_model_load_without_its_next_sentence_task(tmp_path: Path) -> None:
    peer = randomized(BertForPreTraining(CONFIGS["bert"]))
    peer.save_pretrained(tmp_path)
    model: Any = load(tmp_path)
    with torch.no_grad():
        expected = [peer(text[None]).prediction_logits[0] for text in texts()]
        assert_same(model(Ragged.from_list(texts())).logits, expected)


def test_classes_are_counted_by_number_or_by_name() -> None:
    config = {**SMALL, "model_type": "bert", "architectures": ["BertForTokenClassification"]}
    assert BERT.read_config(config).readout.classes == 2
    assert BERT.read_config({**config, "num_labels": 9}).readout.classes == 9
    labels = {"0": "no", "1": "yes", "2": "perhaps"}
    assert BERT.read_config({**config, "id2label": labels}).readout.classes == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "selu"}, "hidden_act='selu'"),
        ({"is_decoder": True}, "is_decoder=true"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ({"architectures": ["BertForMultipleChoice"]}, "use one of BertModel, BertForMaskedLM"),
        ({"model_type": "roberta", "pad_token_id": None}, "pad_token_id=None"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    config = {"model_type": "bert", **SMALL, **changes}
    with pytest.raises(ConfigError, match=reason):
        FAMILIES[config["model_type"]].read_config(config)


def test_a_width_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    made(AutoModelForMaskedLM, CONFIGS["bert"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 41}))
    reason = r"intermediate\.dense\.bias has shape \(40,\), expected \(41,\)"
    with pytest.raises(InputError, match=reason):
        load(tmp_path)


def test_a_recipe_is_saved_as_the_family_it_is_of(tmp_path: Path) -> None:
    model = build("bert-base", width=16, heads=2, hidden=20, layers=1, vocabulary=30, seed=0)
    assert save(model, tmp_path).family == "bert"
    assert load(tmp_path).config == model.config
