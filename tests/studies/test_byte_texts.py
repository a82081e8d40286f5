"""Passages come from their part of the text, and the same seed draws the same ones."""

import gzip
from itertools import islice
from pathlib import Path

import pytest
import torch

from manyheads.errors import InputError
from studies.byte_texts import ByteTexts, read_bytes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHEADS_STUDY_DATA", str(tmp_path))
    read_bytes.cache_clear()
    return tmp_path


def test_topics_are_text_of_python_itself() -> None:
    text = read_bytes("topics")
    assert len(text) > 300_000
    assert b"lambda" in text
    assert read_bytes("topics", 100) == text[:100]


@pytest.mark.usefixtures("folder")
def test_a_missing_text_is_named_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"enwik8\.gz is missing.*byte_texts\.py"):
        read_bytes("enwik8", 10)


def test_training_and_held_out_passages_never_meet(folder: Path) -> None:
    (folder / "numbers.gz").write_bytes(gzip.compress(bytes(range(200)) + b"\xff" * 50))
    texts = ByteTexts("numbers", "cpu", limit=200)
    generator = torch.Generator().manual_seed(0)
    train = texts.passages("train", 500, 6, generator)
    held_out = texts.held_out(500, 4)
    assert train.min() == 0
    assert held_out.min() == 190
    assert train.max() < 190
    assert held_out.max() < 200
    assert (train.diff(dim=1) == 1).all()
    assert held_out.shape == (500, 5)


def test_a_seed_draws_the_same_batches() -> None:
    texts = ByteTexts("topics", "cpu")
    draw = [torch.stack(list(islice(texts.batches(2, 8, seed), 3))) for seed in (0, 0, 1)]
    assert draw[0].shape == (3, 2, 9)
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
