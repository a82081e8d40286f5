"""A tokenizer of ours as transformers opens it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from manyheads import build, load, save

WORDS = ["<|end|>", "[PAD]", "[UNK]", "[MASK]", "a", "b", "c"]


def tokenizer(words: list[str] = WORDS) -> Any:
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    made.add_special_tokens([word for word in words if len(word) > 1])
    return made


def small(kind: str = "gpt2", **more: Any) -> Any:
    model = build(kind, layers=1, width=16, heads=2, vocabulary=len(WORDS), seed=0, **more)
    model.tokenizer = tokenizer()
    return model


@pytest.mark.parametrize(
    ("kind", "more", "inputs"),
    [
        ("gpt2", {}, {"input_ids", "attention_mask"}),
        ("modernbert-base", {"hidden": 16}, {"input_ids", "attention_mask"}),
        ("bert-base", {"hidden": 16}, {"input_ids", "token_type_ids", "attention_mask"}),
    ],
)
def test_theirs_has_as_many_words_and_knows_the_special_ones(
    kind: str, more: Any, inputs: set[str], tmp_path: Path
) -> None:
    model = small(kind, **more)
    save(model, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(theirs) == len(WORDS)
    special = (theirs.eos_token, theirs.pad_token, theirs.unk_token, theirs.mask_token)
    assert special == ("<|end|>", "[PAD]", "[UNK]", "[MASK]")
    given = theirs("a", return_tensors="pt")
    assert set(given) == inputs
    body = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert body(**given).last_hidden_state.shape == (1, 1, 16)


def test_a_model_says_what_ends_its_texts_and_no_config_says_another_word(tmp_path: Path) -> None:
    model = small()
    model.generation = {"eos_token_id": 4}
    save(model, tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "a"
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)


def test_settings_stay_as_they_are_unless_they_are_ours_and_of_another_tokenizer(
    tmp_path: Path,
) -> None:
    save(small(), tmp_path / "one")
    file = tmp_path / "one" / "tokenizer_config.json"
    first = file.read_bytes()
    save(load(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two" / file.name).read_bytes() == first
    model = load(tmp_path / "one")
    model.tokenizer = tokenizer(["[UNK]", "a", "</s>"])
    save(model, tmp_path / "three")
    told = json.loads((tmp_path / "three" / file.name).read_text())
    assert told["eos_token"] == "</s>"
    assert "mask_token" not in told
    theirs = json.dumps({**json.loads(first), "chat_template": "hello"}).encode()
    file.write_bytes(theirs)
    model = load(tmp_path / "one")
    model.tokenizer = tokenizer(["[UNK]", "a", "</s>"])
    save(model, tmp_path / "four")
    assert (tmp_path / "four" / file.name).read_bytes() == theirs
