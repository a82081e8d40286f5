"""Which attentions are streamed: the reasons of those that are not. The kernels: tests/gpu."""

import pytest
import torch

from manyheads.kernels.contract import Request
from manyheads.lens.measure import row_sums
from manyheads.lens.measure.row_sums import RowSumSpec, _sort_by_token, cannot
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.parts.masks import Causal, GlobalTokens
from manyheads.parts.positions import Alibi, T5Buckets
from manyheads.parts.positions.relative import BucketTable
from manyheads.ragged import Lengths


class Pretended(torch.Tensor):
    """A tensor that claims to be on CUDA, so that the other conditions are checked."""

    device = torch.device("cuda")  # type: ignore[assignment]


def reason(
    *, size: int = 8, dtype: torch.dtype = torch.float32, marks: int = 2, **changes: object
) -> str | None:
    lengths = Lengths.of([3, 2])
    choices = {"mask": Causal(), "scale": 1.0} | changes
    request = Request(queries=lengths, keys=lengths, **choices)
    tokens = torch.zeros(5, 2, size, dtype=dtype).as_subclass(Pretended)
    spec = RowSumSpec(offsets=(), marks=torch.zeros(5, marks), ids=None)
    return cannot(TiledScores(tokens, tokens, request), spec)


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sums, "find_spec", lambda name: name)


def test_bands_with_or_without_slopes_are_streamed() -> None:
    assert reason() is None
    assert reason(dtype=torch.bfloat16, bias=Alibi().bias(2, torch.device("cpu"))) is None


def test_others_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BucketTable(T5Buckets(), 2)
    assert "BucketBias" in (reason(bias=table.bias()) or "")
    assert "band" in (reason(mask=GlobalTokens()) or "")
    assert "512 is larger than 128" in (reason(size=512) or "")
    assert "65 marks" in (reason(marks=65) or "")
    assert "torch.float64" in (reason(dtype=torch.float64) or "")
    assert "scale=-1.0" in (reason(scale=-1.0) or "")
    monkeypatch.setattr(row_sums, "find_spec", {}.get)
    assert reason() == "triton is not installed"


def test_tokens_are_sorted_by_sequence_and_word() -> None:
    ids, owner = torch.tensor([7, 5, 7, 7, 5, 7]), torch.tensor([0, 0, 0, 1, 1, 1])
    order, begins = _sort_by_token(ids, owner)
    assert order.tolist() == [1, 0, 2, 4, 3, 5]
    assert begins.tolist() == [0, 1, 1, 3, 4, 4]
    none = _sort_by_token(ids[:0], owner[:0])
    assert [len(each) for each in none] == [0, 0]
