"""The small files that travel with a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from manyheads import build, load, save
from manyheads.checkpoints.companions import KNOWN, OTHERS, TOKENIZER, VOCABULARY
from manyheads.checkpoints.sentences import MODULES, ROW, THEIRS
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
    for name in KNOWN:
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
    for name in KNOWN:
        assert (target / name).read_bytes() == (place / name).read_bytes(), name
    found = {file.name for file in target.iterdir()}
    assert found == {*KNOWN, "config.json", "model.safetensors"}


def test_a_model_built_here_brings_nothing(tmp_path: Path) -> None:
    model = build("council", seed=0)
    assert (model.tokenizer, model.sentence, model.described) == (None, None, None)
    assert [*model.generation, *model.side_files, *model.unread] == []
    save(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_what_generation_needs_is_there_parsed(place: Path) -> None:
    assert load(place).generation == GENERATION
    (place / "generation_config.json").unlink()
    assert load(place).generation == {}


def test_a_changed_generation_is_written(place: Path) -> None:
    model: Any = load(place)
    model.generation = {**model.generation, "do_sample": False}
    save(model, place.parent / "ours")
    assert load(place.parent / "ours").generation == GENERATION | {"do_sample": False}


def test_a_tokenizer_neither_cuts_nor_pads_whatever_its_file_says(place: Path) -> None:
    found = load(place).tokenizer
    assert (found.truncation, found.padding) == (None, None)
    assert found.encode("b").ids == [1]


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
    found = {file.name for file in (place.parent / "ours").iterdir()}
    assert not found & {*VOCABULARY}
    assert found >= {*OTHERS}
    again = load(place.parent / "ours").tokenizer
    assert again is None if other is None else again.to_str() == other.to_str()


@pytest.mark.parametrize("other", [Tokenizer(WordLevel({"c": 0}, unk_token="c")), None])
def test_files_of_an_older_model_do_not_stay_beside_a_new_one(other: Any, place: Path) -> None:
    model: Any = build("gpt2", layers=1, width=16, heads=2, vocabulary=50, seed=0)
    model.tokenizer = other
    save(model, place)
    own = set() if other is None else {TOKENIZER, "tokenizer_config.json"}
    assert {file.name for file in place.iterdir()} & {*KNOWN} == own
    assert (place / "README.md").exists()
    again = load(place).tokenizer
    assert again is None if other is None else again.to_str() == other.to_str()


def test_a_transformer_one_folder_below_is_not_read_in_place_of_a_new_one(place: Path) -> None:
    above = place.parent
    row = {"idx": 0, "name": "0", "path": place.name, "type": f"{THEIRS}models.{ROW[0]}"}
    (above / MODULES).write_text(json.dumps([row]))
    assert load(above).config.embedding.vocabulary == 50
    save(build("gpt2", layers=1, width=16, heads=2, vocabulary=60, seed=0), above)
    assert load(above).config.embedding.vocabulary == 60


def test_a_tokenizer_that_was_there_before_any_model_stays(tmp_path: Path) -> None:
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
        (TOKENIZER, r"tokenizer\.json is no tokenizer"),
        ("generation_config.json", r"generation_config\.json is not JSON"),
        ("tokenizer_config.json", r"tokenizer_config\.json is not JSON"),
    ],
)
def test_a_broken_file_is_named(name: str, reason: str, place: Path) -> None:
    (place / name).write_text("{")
    with pytest.raises(InputError, match=reason):
        load(place)
