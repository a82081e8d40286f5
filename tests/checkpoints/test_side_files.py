"""The small files that travel with a model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from manyheads import build, load, save
from manyheads.checkpoints.sentence_transformers import MODULES, THEIRS
from manyheads.checkpoints.side_files import OTHERS, SIDE_FILES, TOKENIZER, VOCABULARY
from manyheads.cli.main import main
from manyheads.errors import InputError

GENERATION = {"eos_token_id": [3, 5], "do_sample": True}


def tokenizer() -> Any:
    made = Tokenizer(WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="a"))
    made.enable_truncation(3)
    made.enable_padding(pad_id=2, length=5)
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with all the files that travel and some that do not."""
    folder = tmp_path / "theirs"
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0), folder)
    for name in SIDE_FILES:
        (folder / name).write_bytes(b'{"about": "\xd1\x8f"}  ' + name.encode() * name.endswith("m"))
    (folder / TOKENIZER).write_text(json.dumps(json.loads(tokenizer().to_str()), indent=7))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for stranger in ("pytorch_model.bin", "training_args.pt", "README.md", "other.model"):
        (folder / stranger).write_bytes(b"\x80\x04")
    return folder


@pytest.mark.parametrize("by", ["save", "convert"])
def test_known_files_travel_byte_by_byte_and_no_others(by: str, place: Path) -> None:
    target = place.parent / "ours"
    if by == "save":
        save(load(place), target)
    else:
        assert main(["convert", str(place), "-o", str(target)]) == 0
    for name in SIDE_FILES:
        assert (target / name).read_bytes() == (place / name).read_bytes(), name
    result = {file.name for file in target.iterdir()}
    assert result == {*SIDE_FILES, "config.json", "model.safetensors"}


def test_a_model_built_here_brings_nothing(tmp_path: Path) -> None:
    model = build("tiny-encoder", seed=0)
    assert (model.tokenizer, model.sentence, model.source_config) == (None, None, None)
    assert [*model.generation, *model.side_files, *model.unread] == []
    save(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_what_generation_needs_is_parsed(place: Path) -> None:
    assert load(place).generation == GENERATION
    (place / "generation_config.json").unlink()
    assert load(place).generation == {}


def test_a_changed_generation_is_written(place: Path) -> None:
    model: Any = load(place)
    model.generation = {**model.generation, "do_sample": False}
    save(model, place.parent / "ours")
    assert load(place.parent / "ours").generation == GENERATION | {"do_sample": False}


def test_a_tokenizer_neither_cuts_nor_pads_whatever_its_file_has(place: Path) -> None:
    result = load(place).tokenizer
    assert (result.truncation, result.padding) == (None, None)
    assert result.encode("b").ids == [1]


def test_cutting_and_padding_for_a_while_does_not_change_what_is_saved(place: Path) -> None:
    model: Any = load(place)
    model.tokenizer.enable_truncation(2)
    save(model, place.parent / "ours")
    for name in (TOKENIZER, *VOCABULARY):
        assert (place.parent / "ours" / name).read_bytes() == (place / name).read_bytes()
    assert model.tokenizer.truncation["max_length"] == 2


@pytest.mark.parametrize("other", [Tokenizer(WordLevel({"c": 0}, unk_token="c")), None])
def test_the_vocabulary_of_another_tokenizer_stays_behind(other: Any, place: Path) -> None:
    model: Any = load(place)
    model.tokenizer = other
    save(model, place.parent / "ours")
    result = {file.name for file in (place.parent / "ours").iterdir()}
    assert not result & {*VOCABULARY}
    assert result >= {*OTHERS}
    again = load(place.parent / "ours").tokenizer
    assert again is None if other is None else again.to_str() == other.to_str()


@pytest.mark.parametrize("other", [Tokenizer(WordLevel({"c": 0}, unk_token="c")), None])
def test_files_of_an_older_model_do_not_stay_beside_a_new_one(other: Any, place: Path) -> None:
    model: Any = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    model.tokenizer = other
    save(model, place)
    own = set() if other is None else {TOKENIZER, "tokenizer_config.json"}
    assert {file.name for file in place.iterdir()} & {*SIDE_FILES} == own
    assert (place / "README.md").exists()
    again = load(place).tokenizer
    assert again is None if other is None else again.to_str() == other.to_str()


def test_a_transformer_one_folder_below_is_not_read_in_place_of_a_new_one(place: Path) -> None:
    above = place.parent
    row = {"idx": 0, "name": "0", "path": place.name, "type": f"{THEIRS}models.Transformer"}
    (above / MODULES).write_text(json.dumps([row]))
    assert load(above).config.embedding.vocabulary == 50
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=60, seed=0), above)
    assert load(above).config.embedding.vocabulary == 60


def test_a_tokenizer_older_than_the_model_stays(tmp_path: Path) -> None:
    tokenizer().save(str(tmp_path / TOKENIZER))
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0), tmp_path)
    assert load(tmp_path).tokenizer is not None


def test_a_vocabulary_without_a_tokenizer_travels_too(place: Path) -> None:
    (place / TOKENIZER).unlink()
    save(load(place), place.parent / "ours")
    assert (place.parent / "ours" / "vocab.txt").exists()
    assert not (place.parent / "ours" / TOKENIZER).exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (TOKENIZER, r"tokenizer\.json is not a tokenizer"),
        ("generation_config.json", r"generation_config\.json is not JSON"),
        ("tokenizer_config.json", r"tokenizer_config\.json is not JSON"),
    ],
)
def test_a_broken_file_is_named(name: str, reason: str, place: Path) -> None:
    (place / name).write_text("{")
    with pytest.raises(InputError, match=reason):
        load(place)


WORDS = ["<|end|>", "[PAD]", "[UNK]", "[MASK]", "a", "b", "c"]


def special_tokenizer(words: list[str] = WORDS) -> Any:
    made = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    made.add_special_tokens([word for word in words if len(word) > 1])
    return made


def small(kind: str = "gpt2", **more: Any) -> Any:
    model = build(kind, layers=1, width=16, heads=2, vocabulary=len(WORDS), seed=0, **more)
    model.tokenizer = special_tokenizer()
    return model


@pytest.mark.parametrize(
    ("kind", "more", "inputs"),
    [
        ("gpt2", {}, {"input_ids", "attention_mask"}),
        ("modernbert-base", {"hidden": 16}, {"input_ids", "attention_mask"}),
        ("bert-base", {"hidden": 16}, {"input_ids", "token_type_ids", "attention_mask"}),
    ],
)
def test_the_tokenizer_of_transformers_has_the_same_words_and_special_tokens(
    kind: str, more: Any, inputs: set[str], tmp_path: Path
) -> None:
    model = small(kind, **more)
    save(model, tmp_path)
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(peer) == len(WORDS)
    special = (peer.eos_token, peer.pad_token, peer.unk_token, peer.mask_token)
    assert special == ("<|end|>", "[PAD]", "[UNK]", "[MASK]")
    arguments = peer("a", return_tensors="pt")
    assert set(arguments) == inputs
    body = transformers.AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert body(**arguments).last_hidden_state.shape == (1, 1, 16)


def test_a_model_decides_what_ends_its_texts_and_configs_agree(tmp_path: Path) -> None:
    model = small()
    model.generation = {"eos_token_id": 4}
    save(model, tmp_path)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "a"
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.bos_token_id, config.eos_token_id) == (None, None)


def test_settings_stay_unless_we_wrote_them_for_another_tokenizer(
    tmp_path: Path,
) -> None:
    save(small(), tmp_path / "one")
    file = tmp_path / "one" / "tokenizer_config.json"
    first = file.read_bytes()
    save(load(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two" / file.name).read_bytes() == first
    model = load(tmp_path / "one")
    model.tokenizer = special_tokenizer(["[UNK]", "a", "</s>"])
    save(model, tmp_path / "three")
    written = json.loads((tmp_path / "three" / file.name).read_text())
    assert written["eos_token"] == "</s>"
    assert "mask_token" not in written
    peer = json.dumps({**json.loads(first), "chat_template": "hello"}).encode()
    file.write_bytes(peer)
    model = load(tmp_path / "one")
    model.tokenizer = special_tokenizer(["[UNK]", "a", "</s>"])
    save(model, tmp_path / "four")
    assert (tmp_path / "four" / file.name).read_bytes() == peer
