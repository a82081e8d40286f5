"""The store gives back every document, says what is wrong with its files, and splits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads.data import tokenize
from manyheads.data.chunks import FixedChunks
from manyheads.data.sources.texts import InMemoryTexts, TextFiles
from manyheads.data.store import INDEX, StoreIndex, TokenStore, open_store
from manyheads.data.tokenize import write_store
from manyheads.errors import InputError
from tests.data.tiny import TEXTS, store_of, tokenizer
from tests.messages import refuses

BYTES = tokenizer()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "made"
    write_store(InMemoryTexts(TEXTS), BYTES, folder, part_size=100)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def decoded(store: TokenStore, number: int) -> str:
    return str(BYTES.decode(store.document(number).tolist(), skip_special_tokens=False))


def test_every_document_comes_back_with_its_end(folder: Path) -> None:
    store = open_store(folder, BYTES)
    assert len(store) == len(TEXTS)
    assert [decoded(store, number) for number in range(len(TEXTS))] == [
        f"{text}<|end|>" for text in TEXTS
    ]
    assert store.bytes == sum(map(len, TEXTS))
    assert store.tokens.dtype == np.uint16
    assert len(store.index.parts) > 3
    store.verify()
    with refuses(InputError, "there is no document 9: use 0 to 8."):
        store.document(9)


def test_ends_may_be_left_out_and_words_that_look_special_are_words(tmp_path: Path) -> None:
    store = write_store(InMemoryTexts(("a<|end|>b", "c")), BYTES, tmp_path / "s", end=None)
    assert 0 not in store.tokens
    assert decoded(store, 0) == "a<|end|>b"


def test_padding_and_limits_of_the_tokenizer_change_nothing(folder: Path, tmp_path: Path) -> None:
    odd = tokenizer()
    odd.enable_padding(length=99)
    odd.enable_truncation(3)
    store = write_store(InMemoryTexts(TEXTS), odd, tmp_path / "s")
    assert (store.tokens == open_store(folder, odd).tokens).all()


def test_large_vocabularies_take_wider_numbers(tmp_path: Path) -> None:
    wide = tokenizer()
    wide.add_tokens([f"<{number}>" for number in range(2**16)])
    store = write_store(InMemoryTexts(("x <65535>",)), wide, tmp_path / "s")
    assert store.tokens.dtype == np.uint32
    assert store.tokens.max() >= 2**16


def test_nothing_is_a_store_too(tmp_path: Path) -> None:
    store = write_store(InMemoryTexts(()), BYTES, tmp_path / "s")
    assert (len(store), store.size, store.bytes) == (0, 0, 0)


def spoil(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | changes))


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    size = (folder / "tokens.bin").stat().st_size
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(size - 1)
        file.write(b"\xff")
    with refuses(InputError, f"{folder}/tokens.bin is damaged in tokens", "tokenized again"):
        open_store(folder).verify()
    with (folder / "tokens.bin").open("r+b") as file:
        file.truncate(size - 2)
    with refuses(
        InputError,
        f"{folder}/tokens.bin has {size - 2} bytes, and index.json says {size}: ",
        "tokenized again",
    ):
        open_store(folder)
    (folder / "tokens.bin").unlink()
    with pytest.raises(InputError, match=r"tokens\.bin has 0 bytes"):
        open_store(folder)
    with refuses(InputError, f"{tmp_path} is not a token store: give a folder with index.json."):
        open_store(tmp_path)


def test_a_damaged_index_is_refused(folder: Path) -> None:
    with refuses(
        InputError,
        f"{folder} was made with another tokenizer: use that one, or tokenize again.",
    ):
        open_store(folder, tokenizer(size=270))
    unfinished = replace(StoreIndex.read(folder), finished=False).to_json()
    spoil(folder, dtype="<i2")
    with refuses(InputError, f"{folder}/index.json is damaged", "tokenized again"):
        open_store(folder)
    (folder / INDEX).write_text(unfinished)
    with refuses(
        InputError,
        f"{folder} is incomplete: it has 9 documents so far: "
        "call write_store again, which resumes.",
    ):
        open_store(folder)
    spoil(folder, format=1)
    with refuses(InputError, f"{folder}/index.json has format 1", "tokenized again"):
        open_store(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(InputError, match=r"index\.json is damaged \(JSONDecodeError"):
        open_store(folder)


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
def test_a_split_by_tokens_ends_a_document_where_one_is_near(share: float) -> None:
    store = store_of([10] * 100)
    training, validation = store.split(share)
    assert (training.start, validation.stop) == (0, 1000)
    assert training.stop == validation.start == 1000 - round(1000 * share)
    assert len(training) + len(validation) == 100
    assert training.bytes + validation.bytes == store.bytes
    assert validation.bytes_per_token == 3


def test_a_split_of_one_document_keeps_bytes_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The document is longer than what is tokenized at a time.
    monkeypatch.setattr(tokenize, "AT_A_TIME", 2**17)
    text = "".join(f"line {number} of a very long text, é\n" for number in range(6_000))
    (tmp_path / "a.txt").write_text(text)
    store = write_store(TextFiles(tmp_path / "a.txt"), BYTES, tmp_path / "s")
    training, validation = store.split(0.2)
    assert validation.size / store.size == pytest.approx(0.2, abs=0.02)
    assert len(training) == len(validation) == 1
    for part in (training, validation):
        ids = part.tokens[part.start : part.stop].tolist()
        assert len(BYTES.decode(ids).encode()) == part.bytes


def test_a_split_by_documents_counts_them() -> None:
    training, validation = store_of([1, 50, 3, 200]).split(0.25, by="documents")
    assert (len(training), len(validation)) == (3, 1)
    assert validation.size == 200
    again, last = training.split(0.01, by="documents")
    assert (again.size, last.size) == (51, 3)


def test_what_cannot_be_split_is_refused() -> None:
    with refuses(InputError, "fraction must be between 0 and 1, got 1.5: use a value such as 0.1."):
        store_of([3]).split(1.5)
    with refuses(
        InputError,
        "cannot split off the last 0.1 of 1 documents and 3 tokens: "
        "use more text, another fraction, or a separator that gives more documents.",
    ):
        store_of([3]).split(0.1, by="documents")


def flip(file: Path, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_flipped_bit_is_detected_when_its_block_is_first_read(folder: Path) -> None:
    index = StoreIndex.read(folder)
    # In the second part, so that the first is still good.
    start = index.parts[0].tokens
    flip(folder / "tokens.bin", 16 * start + 3)
    store = open_store(folder)
    before, _ = store.split(0.3)
    assert store.read(0, start).tolist() == store.tokens[:start].tolist()
    assert store.blocks.verified.tolist() == [True] + [False] * (len(index.parts) - 1)
    assert before.blocks is store.blocks
    with refuses(InputError, f"tokens.bin is damaged in tokens {start} to", "tokenized again"):
        before.read(start - 1, start + 1)
    with refuses(InputError, f"tokens.bin is damaged in tokens {start} to"):
        FixedChunks(store, length=start).batch([0, 1])


@pytest.mark.parametrize("file", ["documents.bin", "passages.bin", INDEX])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.95])
def test_a_flipped_bit_in_the_tables_or_the_index_is_detected_at_once(
    folder: Path, file: str, place: float
) -> None:
    flip(folder / file, int(place * 8 * (folder / file).stat().st_size))
    with refuses(InputError, f"{folder}/{file} is damaged", "tokenized again"):
        open_store(folder)
