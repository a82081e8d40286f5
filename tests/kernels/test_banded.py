"""Windows cost what the window costs, not what the sequence does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.kernels import banded, reference
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Causal, GlobalTokens, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.ragged import Lengths


@given(
    each=st.lists(st.integers(0, 150), max_size=4),
    before=st.integers(0, 200),
    after=st.integers(0, 200),
    alibi=st.booleans(),
)
def test_blocks_of_their_real_size_give_the_reference(
    each: list[int], before: int, after: int, alibi: bool
) -> None:
    lengths = Lengths.of(each)
    leaves = [torch.randn(lengths.total, heads, 4, requires_grad=True) for heads in (2, 1, 1)]
    bias = Alibi().bias(2, torch.device("cpu")) if alibi else None
    request = Request(
        queries=lengths,
        keys=lengths,
        mask=Window(before, after),
        scale=0.5,
        bias=bias,
        want=Want(lse=True),
    )
    pull = torch.randn(lengths.total, 2, 4)
    result, expected = (kernel.attend(*leaves, request) for kernel in (banded, reference))
    torch.testing.assert_close(result.output, expected.output)
    torch.testing.assert_close(result.lse, expected.lse)
    if lengths.total:
        for one, other in zip(
            torch.autograd.grad((result.output * pull).sum(), leaves),
            torch.autograd.grad((expected.output * pull).sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1000, 4000])
@pytest.mark.parametrize("window", [(128, 0), (64, 64), (16, 0)])
def test_a_query_meets_a_strip_as_long_as_its_window(
    tokens: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []
    flash = banded.flash_cpu

    def spy(q: Any, k: Any, *more: Any) -> Any:
        met.append(q.shape[0] * q.shape[2] * k.shape[2])
        return flash(q, k, *more)

    monkeypatch.setattr(banded, "flash_cpu", spy)
    lengths = Lengths.of([tokens])
    q = torch.randn(tokens, 1, 4)
    banded.attend(q, q, q, Request(queries=lengths, keys=lengths, mask=Window(*window), scale=1.0))
    assert sum(met) <= (tokens + banded.BLOCK) * (sum(window) + banded.BLOCK)


def test_what_is_no_band_of_the_same_tokens_is_refused() -> None:
    lengths = Lengths.of([5, 3])
    request = Request(queries=lengths, keys=lengths, mask=Window(2), scale=1.0)
    facts = TensorFacts(
        device="cpu",
        dtype=torch.float32,
        heads=4,
        kv_heads=2,
        size=8,
        value_size=8,
        grad=True,
    )
    assert banded.cannot(request, facts) is None
    refused = {
        "not limited": (replace(request, mask=Causal()), facts),
        "both sides": (replace(request, mask=Window(2) | GlobalTokens()), facts),
        "not the same tokens": (replace(request, keys=Lengths.of([6, 3])), facts),
        "are not the same": (replace(request, keys=Lengths.with_capacity([5, 3], 8, "cpu")), facts),
        "values have size 4": (request, replace(facts, value_size=4)),
        "dropout": (replace(request, dropout=0.5), facts),
        "pattern": (replace(request, want=Want(pattern=True)), facts),
        "runs on the CPU": (request, replace(facts, device="cuda")),
    }
    for reason, case in refused.items():
        assert reason in str(banded.cannot(*case))
