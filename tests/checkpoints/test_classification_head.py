"""New heads for classes: the body stays, and transformers can open what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from manyheads import build, load, save, surgery
from manyheads.checkpoints.classification_head import name_classes, with_classes
from manyheads.errors import ConfigError
from manyheads.models.readout import ClassHead, TokenHead
from tests.messages import refuses

SMALL: dict[str, dict[str, Any]] = {
    "bert-base": {"hidden": 32, "vocabulary": 60},
    "modernbert-base": {"hidden": 32, "vocabulary": 60},
    "gpt2": {"vocabulary": 60},
    "llama-1b-shape": {"hidden": 32, "kv_heads": 2, "head_size": 8, "vocabulary": 60},
    "vit-b16": {"hidden": 32, "image": 8, "patch": 4},
}


def small(size: str) -> Any:
    return build(size, layers=2, width=32, heads=4, seed=0, **SMALL[size])


@pytest.mark.parametrize("size", list(SMALL))
@pytest.mark.parametrize("of", ["texts", "tokens", "images"])
def test_classes_of_every_family_open_in_transformers(size: str, of: Any, tmp_path: Path) -> None:
    model = small(size)
    if (of == "images") != (size == "vit-b16"):
        with pytest.raises(ConfigError, match=f"of='{of}' does not fit a model that reads"):
            with_classes(model, 3, of)
        return
    classes = with_classes(model, ("a", "b", "c"), of)
    saved = save(classes, tmp_path)
    again = load(tmp_path)
    assert isinstance(again.config.readout, TokenHead if of == "tokens" else ClassHead)
    assert again.class_names == ("a", "b", "c")
    assert saved.family != "manyheads"
    assert again.source_config is not None
    kind = getattr(transformers, again.source_config["architectures"][0])
    peer, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert peer.config.id2label == {0: "a", 1: "b", 2: "c"}
    body = {name: each for name, each in model.state_dict().items() if "readout" not in name}
    now = classes.state_dict()
    assert all(torch.equal(now[name], each) for name, each in body.items())
    if of == "texts":
        ids = torch.tensor([[3, 4, 5, 6]])
        peer.config.pad_token_id = 0
        with torch.no_grad():
            torch.testing.assert_close(classes(ids).logits, peer.eval()(ids).logits)


def test_what_a_file_has_of_the_head_is_read_as_by_transformers(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=30,
        num_labels=3,
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    peer = transformers.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    ours = with_classes(load(tmp_path), 3)
    with torch.no_grad():
        ours.readout.weight.copy_(peer.classifier.weight)
        ids = torch.tensor([[3, 4, 5]])
        torch.testing.assert_close(ours(ids).logits, peer(ids).logits)


def test_a_masked_modernbert_keeps_the_dense_layer_of_its_head() -> None:
    words = small("modernbert-base")
    now = with_classes(words, 2).state_dict()
    was = words.state_dict()
    name = "readout.transform.dense.weight"
    assert torch.equal(now[name], was[name])


def test_models_of_no_family_get_a_plain_head_and_keep_their_names(tmp_path: Path) -> None:
    model = build("tiny-encoder", seed=0)
    classes = with_classes(model, ("x", "y"))
    assert classes.config.readout == ClassHead(classes=2, pool="first")
    assert save(classes, tmp_path).family == "manyheads"
    assert load(tmp_path).class_names == ("x", "y")


def test_texts_that_no_token_opens_are_pooled_whole() -> None:
    assert with_classes(load("house-bert"), 2).config.readout.pool == "mean"


def test_heads_differ_by_seed_alone() -> None:
    heads = [with_classes(small("bert-base"), 2, seed=seed).readout.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_classes_can_be_named_later() -> None:
    model = with_classes(small("bert-base"), 2)
    assert not model.class_names
    name_classes(model, ("glad", "sad"))
    assert model.class_names == ("glad", "sad")
    with refuses(ConfigError, "2 names, one per class, got 1: glad"):
        name_classes(model, ("glad",))
    with refuses(ConfigError, "the model has no classes: add some with with_classes."):
        name_classes(small("gpt2"), ("glad", "sad"))


def test_classes_that_cannot_be_are_refused() -> None:
    model = small("bert-base")
    with refuses(ConfigError, "2 to", "classes, got 1"):
        with_classes(model, 1)
    with refuses(ConfigError, "two classes have the name 'a': give each its own"):
        with_classes(model, ("a", "b", "a"))
    translator = build(
        "transformer-base", layers=1, width=16, heads=2, hidden=16, vocabulary=30, seed=0
    )
    message = "an encoder-decoder cannot classify texts: give an encoder or a decoder."
    with refuses(ConfigError, message):
        with_classes(translator, 2)


def test_a_model_with_adapters_is_refused() -> None:
    model = small("gpt2")
    surgery.adapt(model, surgery.LoraConfig(rank=1))
    with pytest.raises(ConfigError, match="the model has adapters"):
        with_classes(model, 2)


def test_files_about_generation_or_vectors_are_not_copied(tmp_path: Path) -> None:
    model = small("gpt2")
    model.generation = {"eos_token_id": 3}
    save(model, tmp_path / "words")
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"model_max_length": 9}')
    save(with_classes(load(tmp_path / "words"), 2), tmp_path / "classes")
    there = {file.name for file in (tmp_path / "classes").iterdir()}
    assert there == {"config.json", "model.safetensors", "tokenizer_config.json"}
