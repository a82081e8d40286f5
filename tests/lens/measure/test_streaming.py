"""Which attentions are streamed: the reasons of those that are not. The kernels: tests/gpu."""

import pytest
import torch

from manyheads.kernels.contract import Request
from manyheads.lens.measure import watcher
from manyheads.lens.measure.row_sums import Wanted
from manyheads.lens.measure.score_tiles import Meeting
from manyheads.lens.measure.watcher import _by_word, cannot
from manyheads.parts.masks import Causal, GlobalTokens
from manyheads.parts.positions import Alibi, T5Buckets
from manyheads.parts.positions.relative import BucketTable
from manyheads.ragged import Lengths


class Pretended(torch.Tensor):
    """A tensor that says it lies on CUDA, so that the rest is asked of it."""

    device = torch.device("cuda")  # type: ignore[assignment]


def asked(
    *, size: int = 8, dtype: torch.dtype = torch.float32, marks: int = 2, **changes: object
) -> str | None:
    lengths = Lengths.of([3, 2])
    choices = {"mask": Causal(), "scale": 1.0} | changes
    request = Request(queries=lengths, keys=lengths, **choices)
    tokens = torch.zeros(5, 2, size, dtype=dtype).as_subclass(Pretended)
    wanted = Wanted(offsets=(), marks=torch.zeros(5, marks), ids=None)
    return cannot(Meeting(tokens, tokens, request), wanted)


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "find_spec", lambda name: name)


def test_bands_with_or_without_slopes_are_streamed() -> None:
    assert asked() is None
    assert asked(dtype=torch.bfloat16, bias=Alibi().bias(2, torch.device("cpu"))) is None


def test_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BucketTable(T5Buckets(), 2)
    assert asked(bias=table.bias()) == "BucketBias is looked up for each pair"
    assert asked(mask=GlobalTokens()) == "the mask is not a band around the diagonal"
    assert asked(size=512) == "a head of 512 channels is larger than 128"
    assert asked(marks=65) == "65 marks are more than 64"
    assert asked(dtype=torch.float64) == "the tensor cores know no torch.float64"
    assert asked(scale=-1.0) == "scale=-1.0 turns the order of scores around"
    monkeypatch.setattr(watcher, "find_spec", {}.get)
    assert asked() == "triton is not installed"


def test_tokens_are_sorted_by_sequence_and_word() -> None:
    ids, owner = torch.tensor([7, 5, 7, 7, 5, 7]), torch.tensor([0, 0, 0, 1, 1, 1])
    order, begins = _by_word(ids, owner)
    assert order.tolist() == [1, 0, 2, 4, 3, 5]
    assert begins.tolist() == [0, 1, 1, 3, 4, 4]
    none = _by_word(ids[:0], owner[:0])
    assert [len(each) for each in none] == [0, 0]
