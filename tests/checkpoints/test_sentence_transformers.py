"""Folders of sentence-transformers, read and written back."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Qwen3Config,
    Qwen3Model,
)

from manyheads import build, encode, load, save
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.provenance import SentenceConfig
from tests.checkpoints.peer_models import randomized
from tests.checkpoints.sentence_folders import (
    TEXTS,
    flags,
    opened,
    sentence_folder,
    vectors,
    write_json,
)

POOLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "mean": (flags("mean_tokens"), "mean"),
    "cls": (flags("cls_token"), "cls"),
    "last": (flags("lasttoken"), "last"),
    "named mean": ({"embedding_dimension": 24, "pooling_mode": "mean"}, "mean"),
    "named last": ({"embedding_dimension": 24, "pooling_mode": ["lasttoken"]}, "last"),
    "unnamed": ({"word_embedding_dimension": 24}, "mean"),
}


@pytest.mark.parametrize("name", POOLINGS)
@pytest.mark.parametrize("inner", ["", "0_Transformer"])
def test_a_folder_describes_its_vectors_and_keeps_them_when_saved(
    inner: str, name: str, tmp_path: Path
) -> None:
    config, pooling = POOLINGS[name]
    place = sentence_folder(tmp_path / "theirs", inner=inner, pooling=config)
    model = load(place)
    assert model.sentence == SentenceConfig(pooling=pooling, normalize=True, max_length=16)
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), vectors(place))
    assert load(tmp_path / "ours").sentence == model.sentence


def test_a_class_whose_head_is_not_stored_is_read_without_it(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "folder")
    config = json.loads((place / "config.json").read_text())
    write_json(place / "config.json", config | {"architectures": ["BertForMaskedLM"]})
    ours: Any = load(place)
    ours_vectors = encode(ours, TEXTS[:3], progress=False)
    assert np.allclose(ours_vectors, vectors(place)[:3], atol=1e-5)
    save(ours, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())
    assert saved["architectures"] == ["BertModel"]
    assert np.allclose(vectors(tmp_path / "saved"), vectors(place), atol=1e-5)
    (place / "modules.json").unlink()
    with pytest.raises(InputError, match=r"cls\.predictions.* is missing"):
        load(place)


def test_vectors_may_be_left_as_long_as_they_are(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "theirs", norm=False)
    model = load(place)
    assert model.sentence == SentenceConfig(pooling="mean", normalize=False, max_length=16)
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), vectors(place))
    assert not np.allclose(np.linalg.norm(vectors(place), axis=1), 1.0)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_changed_sentence_is_the_one_that_is_written(pooling: Any, tmp_path: Path) -> None:
    config = flags("cls_token") | {"include_prompt": False}
    place = sentence_folder(tmp_path / "theirs", pooling=config)
    model: Any = load(place)
    model.sentence = SentenceConfig(pooling=pooling, normalize=False, max_length=9)
    save(model, tmp_path / "ours")
    peer = opened(tmp_path / "ours")
    assert peer.max_seq_length == 9
    assert len(peer) == 2
    assert peer[1].pooling_mode == {"last": "lasttoken"}.get(pooling, pooling)
    assert not peer[1].include_prompt
    assert load(tmp_path / "ours").sentence == model.sentence


def test_a_model_with_a_sentence_config_opens_in_sentence_transformers(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "theirs")
    model: Any = build(load(place).config, seed=0)
    assert model.sentence is None
    model.tokenizer = load(place).tokenizer
    model.sentence = SentenceConfig(pooling="cls", normalize=True)
    save(model, tmp_path / "ours")
    assert opened(tmp_path / "ours").encode(TEXTS).shape == (len(TEXTS), 24)
    assert load(tmp_path / "ours").sentence == SentenceConfig(
        pooling="cls", normalize=True, max_length=32
    )


def test_what_the_newest_version_writes_is_read(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "old")
    modules = [Transformer(str(place)), Pooling(24, "lasttoken")]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "new"))
    listed = json.loads((tmp_path / "new" / "modules.json").read_text())
    assert "base.modules" in listed[0]["type"]
    settings = json.loads((tmp_path / "new" / "sentence_bert_config.json").read_text())
    assert "max_seq_length" not in settings
    model = load(tmp_path / "new")
    max_length = opened(tmp_path / "new").max_seq_length
    assert model.sentence == SentenceConfig(pooling="last", normalize=False, max_length=max_length)
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), vectors(tmp_path / "new"))


def test_without_a_length_the_tokenizer_or_the_positions_say_where_a_text_is_cut(
    tmp_path: Path,
) -> None:
    place = sentence_folder(tmp_path)
    write_json(place / "sentence_bert_config.json", {"max_seq_length": None})
    assert load(place).sentence == SentenceConfig(normalize=True, max_length=24)
    assert opened(place).max_seq_length == 24
    (place / "tokenizer_config.json").unlink()
    assert load(place).sentence == SentenceConfig(normalize=True, max_length=32)


def test_a_length_beyond_the_positions_is_cut_to_them(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    write_json(place / "sentence_bert_config.json", {"max_seq_length": 4000})
    assert load(place).sentence == SentenceConfig(normalize=True, max_length=32)


def test_the_settings_may_be_named_after_the_family(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    (place / "sentence_bert_config.json").rename(place / "sentence_roberta_config.json")
    assert load(place).sentence == SentenceConfig(normalize=True, max_length=16)


def test_texts_are_lowered_where_the_folder_asks_for_it(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "theirs")
    assert load(place).tokenizer.encode("A Words").ids == [2, 8, 9, 3]
    write_json(place / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": True})
    model = load(place)
    assert model.tokenizer.encode("A Words").ids == [2, 4, 7, 3]
    assert opened(place).tokenizer("A Words")["input_ids"] == [2, 4, 7, 3]
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), vectors(place))
    before, after = (load(each).tokenizer.to_str() for each in (place, tmp_path / "ours"))
    assert before == after


def test_prompts_and_what_else_they_know_travel(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "theirs")
    known = {"prompts": {"query": "a words"}, "similarity_fn_name": "dot"}
    write_json(place / "config_sentence_transformers.json", known)
    save(load(place), tmp_path / "ours")
    peer = opened(tmp_path / "ours")
    assert peer.prompts["query"] == "a words"
    assert peer.similarity_fn_name == "dot"


def test_hidden_states_do_not_change_for_what_stands_behind_them(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    with_modules: Any = load(place)
    (place / "modules.json").unlink()
    plain: Any = load(place)
    assert plain.sentence is None
    ids = torch.tensor([[2, 4, 5, 3]])
    with torch.no_grad():
        assert torch.equal(with_modules(ids).hidden, plain(ids).hidden)
    assert with_modules(ids).logits is None


def test_a_transformer_alone_is_a_plain_model(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path, inner="0_Transformer")
    listed = json.loads((place / "modules.json").read_text())
    write_json(place / "modules.json", listed[:1])
    model = load(place)
    assert model.sentence is None
    assert model.tokenizer is not None


def test_a_cross_encoder_is_a_classifier_and_scores_as_before_when_saved(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "base")
    config = BertConfig.from_pretrained(place, num_labels=1)
    randomized(BertForSequenceClassification(config)).save_pretrained(tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (place / name).rename(tmp_path / "plain" / name)
    peer = CrossEncoder(
        str(tmp_path / "plain"), device="cpu", activation_fn=torch.nn.Tanh(), local_files_only=True
    )
    peer.save_pretrained(str(tmp_path / "theirs"))
    model = load(tmp_path / "theirs")
    assert model.sentence is None
    assert model.config.readout.classes == 1
    save(model, tmp_path / "ours")
    again = CrossEncoder(str(tmp_path / "ours"), device="cpu", local_files_only=True)
    pairs = [("a model", "of words"), ("words", "a")]
    assert isinstance(again.activation_fn, torch.nn.Tanh)
    assert np.array_equal(again.predict(pairs), peer.predict(pairs))


def test_a_decoder_gives_the_vector_of_its_last_token(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path / "theirs", pooling=flags("lasttoken"))
    config = Qwen3Config(
        vocab_size=10,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=32,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    randomized(Qwen3Model(config)).save_pretrained(place)
    model = load(place)
    assert model.sentence == SentenceConfig(pooling="last", normalize=True, max_length=16)
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), vectors(place))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (flags("max_tokens"), "is max: use mean, cls, lasttoken"),
        (flags("mean_tokens") | {"pooling_mode_cls_token": True}, "is cls and mean"),
        ({"pooling_mode": "weightedmean"}, "is weightedmean"),
        ({"pooling_mode": ["mean", "max"]}, "is mean and max"),
    ],
)
def test_other_poolings_are_refused_by_name(
    config: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    place = sentence_folder(tmp_path, pooling=config)
    with pytest.raises(InputError, match=reason):
        load(place)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ({"path": "3_Dense", "type": "sentence_transformers.models.Dense"}, "Normalize, Dense"),
        ({"path": "3_CNN", "type": "sentence_transformers.models.CNN"}, r"models\.CNN'"),
        ({"path": "", "type": "custom_code.Transformer"}, "module 'custom_code.Transformer'"),
        ({"path": ""}, "module None"),
        ("Dense", "module None"),
        ({"path": "", "type": "sentence_transformers.models.Normalize"}, "got .*Normalize"),
        ({"path": "../x", "type": "sentence_transformers.models.Pooling"}, "outside its folder"),
    ],
)
def test_other_modules_are_refused_by_name(module: Any, reason: str, tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    listed = json.loads((place / "modules.json").read_text())
    write_json(place / "modules.json", [*listed, module])
    with pytest.raises(InputError, match=reason):
        load(place)


ACTIVATIONS = {"tanh": nn.Tanh(), "none": nn.Identity(), "relu": nn.ReLU(), "gelu": nn.GELU()}


def dense_folder(place: Path, *sizes: int, bias: bool, activation: str, norm: bool) -> Path:
    """Modules as they save them themselves."""
    sentence_folder(place / "plain")
    peer = opened(place / "plain")
    torch.manual_seed(0)
    dense = [
        Dense(*pair, bias=bias, activation_function=ACTIVATIONS[activation])
        for pair in pairwise((24, *sizes))
    ]
    ends = [peer[2]] if norm else []
    SentenceTransformer(modules=[peer[0], peer[1], *dense, *ends], device="cpu").save(
        str(place / "dense")
    )
    return place / "dense"


@pytest.mark.parametrize(
    ("sizes", "bias", "activation", "norm"),
    [
        ((8,), True, "tanh", True),
        ((40, 12), False, "none", True),
        ((8,), True, "gelu", False),
        ((24,), False, "relu", True),
    ],
)
def test_dense_modules_project_the_vectors(
    sizes: tuple[int, ...], bias: bool, activation: str, norm: bool, tmp_path: Path
) -> None:
    place = dense_folder(tmp_path, *sizes, bias=bias, activation=activation, norm=norm)
    model = load(place)
    assert model.sentence is not None
    assert [each.activation for each in model.sentence.dense] == [activation] * len(sizes)
    expected = vectors(place)
    with pytest.warns(TruncationWarning):
        result = encode(model, TEXTS, progress=False)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)
    save(model, tmp_path / "ours")
    assert np.array_equal(vectors(tmp_path / "ours"), expected)
    assert load(tmp_path / "ours").sentence == model.sentence


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation_function": "my.Code"}, "Tanh, Identity"),
        ({"activation_function": "torch.nn.modules.activation.Softmax"}, "Softmax"),
        ({"module_input_name": "token_embeddings"}, "use sentence_embedding"),
        ({"use_residual": True}, "use false"),
        ({"bias": False}, "same model"),
    ],
)
def test_other_dense_modules_are_refused_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    place = dense_folder(tmp_path, 8, bias=True, activation="tanh", norm=True)
    config = json.loads((place / "2_Dense" / "config.json").read_text())
    write_json(place / "2_Dense" / "config.json", config | changes)
    with pytest.raises(InputError, match=reason):
        load(place)


def test_dense_weights_in_a_pickle_are_refused(tmp_path: Path) -> None:
    place = dense_folder(tmp_path, 8, bias=True, activation="tanh", norm=True)
    weights = place / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(InputError, match="pickle"):
        load(place)


def test_a_folder_without_its_pooling_names_the_missing_file(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    (place / "1_Pooling" / "config.json").unlink()
    with pytest.raises(InputError, match=r"there is no .*1_Pooling/config\.json"):
        load(place)


def test_modules_that_are_no_list_are_refused(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path)
    write_json(place / "modules.json", {})
    with pytest.raises(InputError, match=r"modules\.json must hold a list .*got a dict"):
        load(place)
    write_json(place / "modules.json", [])
    with pytest.raises(InputError, match="got none"):
        load(place)


def test_errors_name_the_inner_folder(tmp_path: Path) -> None:
    place = sentence_folder(tmp_path, inner="0_Transformer")
    weights = place / "0_Transformer" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(InputError, match=r"0_Transformer has its weights in a pickle"):
        load(place)
    write_json(place / "0_Transformer" / "config.json", {"model_type": "llm"})
    with pytest.raises(InputError, match=r"0_Transformer"):
        load(place)
