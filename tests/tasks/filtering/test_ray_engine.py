"""The Ray engine: the same output in the same order as without it."""

import builtins
from inspect import signature
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from manyheads import classify, encode, with_classes
from manyheads.encoding.encode import Options, encode_with_counts
from manyheads.errors import InputError, MissingPackageError, TruncationWarning
from manyheads.tasks import classify_with_ray, encode_with_ray, filter_corpus
from manyheads.tasks.filtering import ray_engine
from tests.encoding.tiny import small
from tests.messages import refuses
from tests.tasks.filtering.test_corpus_filter import rows, write_rows

# Ray itself leaves sockets open and uses what is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
WORKER_UNIT = "a cluster of Ray"

TEXTS = ["the cat sat", "on", "a mat by the sun"] * 8


@pytest.fixture(scope="module")
def model() -> Any:
    return with_classes(small(), ("bad", "good"))


@pytest.mark.usefixtures("cluster")
def test_a_filter_writes_the_same_rows(model: Any, tmp_path: Path) -> None:
    for index in range(3):
        write_rows(tmp_path / "corpus" / f"{index}.jsonl", rows(40, 40 * index))
    options: Any = {"keep": 'score > 0.5 and lang == "en"', "block_rows": 16, "shard_rows": 30}
    plain = filter_corpus(tmp_path / "corpus", model, tmp_path / "plain", **options)
    on_ray = filter_corpus(
        tmp_path / "corpus", model, tmp_path / "ray", engine="ray", workers=2, **options
    )
    assert plain.counts == on_ray.counts
    assert len(plain.shards) > 1
    for one, other in zip(plain.shards, on_ray.shards, strict=True):
        ours, peer = pq.read_table(one), pq.read_table(other)
        numbers = ["score", "probability"]
        assert ours.drop(numbers).equals(peer.drop(numbers))
        # Workers have other numbers of threads, which changes the rounding.
        for name in numbers:
            torch.testing.assert_close(
                torch.tensor(ours.column(name).to_pylist()),
                torch.tensor(peer.column(name).to_pylist()),
            )


@pytest.mark.usefixtures("cluster")
def test_vectors_classes_and_errors_are_the_same(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "TEXTS_PER_TASK", 7)
    counts: list[int] = []
    originals = (ray_engine.encode_on_workers, ray_engine.classify_on_workers)
    for original in originals:

        def counted(*arguments: Any, original: Any = original) -> Any:
            result = original(*arguments)
            encoded = result[1] if isinstance(result, tuple) else result
            counts.append(encoded.tokens)
            return result

        monkeypatch.setattr(ray_engine, original.__name__, counted)
    # Every worker is a process that imports torch: one is enough where order is not the point.
    vectors = encode_with_ray(model, TEXTS, workers=2, progress=False)
    torch.testing.assert_close(vectors, encode(model, TEXTS))
    with pytest.warns(TruncationWarning, match="truncated to 3 tokens"):
        classes = classify_with_ray(model, TEXTS, max_length=3, workers=1)
    expected = classify(model, TEXTS, max_length=3)
    torch.testing.assert_close(classes.probabilities, expected.probabilities)
    assert classes.labels == expected.labels
    assert classes.names == ("bad", "good")
    for count, max_length in zip(counts, (None, 3), strict=True):
        options = Options(progress=False, max_length=max_length)
        assert count == encode_with_counts(model, TEXTS, options).tokens
    with refuses(InputError, "token id 99", "ids of 0 to 39"):
        encode_with_ray(model, [[5, 99]], workers=1, progress=False)


def test_a_single_text_is_one_row(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is on the way to the workers, without them.
    def here(model: Any, parts: Any, work: Any, **_: Any) -> Any:
        return (work(model, part) for part in parts)

    monkeypatch.setattr(ray_engine, "ray_map", here)
    classes = classify_with_ray(model, TEXTS[0], workers=1, progress=False)
    assert classes.labels == classify(model, TEXTS[0]).labels
    assert classes.probabilities.shape == (1, 2)
    assert encode_with_ray(model, TEXTS[0], progress=False).shape == encode(model, TEXTS[0]).shape


def test_a_missing_ray_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_ray(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == "ray":
            raise ImportError(name)
        return original(name, *more)

    monkeypatch.setattr(builtins, "__import__", without_ray)
    with refuses(MissingPackageError, "ray", "pip install 'manyheads[ray]'"):
        encode_with_ray(model, TEXTS, progress=False)


@pytest.mark.parametrize(
    ("plain", "on_ray"), [(classify, classify_with_ray), (encode, encode_with_ray)]
)
def test_ray_is_called_as_the_plain_function_is(plain: Any, on_ray: Any) -> None:
    parameters = dict(signature(on_ray).parameters)
    assert parameters.pop("workers").default is None
    assert parameters.pop("device").default == "auto"
    ours = {name: each for name, each in signature(plain).parameters.items() if name != "device"}
    assert [(name, each.kind, each.default) for name, each in parameters.items()] == [
        (name, each.kind, each.default) for name, each in ours.items()
    ]
