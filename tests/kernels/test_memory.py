"""No kernel of the CPU needs memory that grows with the square of the length."""

import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyheads.kernels import banded, batched, fused, reference
from manyheads.kernels.contract import Request, TensorFacts
from manyheads.parts.masks import Blocks, Causal, Full, Mask, Window
from manyheads.parts.positions.alibi import Alibi
from manyheads.ragged import Lengths

SHORT, LONG = 256, 512


class Watched(TorchDispatchMode):
    """The most bytes that were alive at once, and the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = self.largest = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        return result

    def _meet(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := storage._cdata) in self.alive:
            return
        self.alive[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        self.largest = max(self.largest, storage.nbytes())
        weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        self.now -= self.alive.pop(key)


def measured(work: Callable[[], object]) -> Watched:
    with Watched() as watched:
        work()
    return watched


def train(
    kernel: ModuleType, mask: Mask, alibi: bool, tokens: int, grad: bool = True, heads: int = 2
) -> Watched:
    q, k, v = (torch.randn(tokens, count, 4).requires_grad_(grad) for count in (heads, 1, 1))
    lengths = Lengths.of([tokens])
    bias = Alibi().bias(heads, q.device) if alibi else None
    request = Request(queries=lengths, keys=lengths, mask=mask, scale=0.5, bias=bias)
    assert kernel.cannot(request, TensorFacts.of(q, k, v, request)) is None

    def work() -> None:
        output = kernel.attend(q, k, v, request).output
        if grad:
            output.sum().backward()

    return measured(work)


CASES = {
    "reference, causal": (reference, Causal(), False),
    "reference, alibi": (reference, Full(), True),
    "batched, causal": (batched, Causal(), False),
    "batched, alibi": (batched, Full(), True),
    "fused, causal": (fused, Causal(), False),
    "fused, blocks": (fused, Blocks(64), False),
    "fused, alibi": (fused, Causal(), True),
    "banded": (banded, Window(32, 32), False),
    "banded, alibi": (banded, Window(32), True),
}


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("case", CASES)
def test_twice_the_tokens_need_at_most_twice_the_memory(
    case: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "LARGEST_CHUNK", 2**14)
    short, long = (train(*CASES[case], tokens, grad) for tokens in (SHORT, LONG))
    assert long.peak <= 2.1 * short.peak
    assert long.largest <= 2.1 * short.largest


@pytest.mark.parametrize(
    "case", ["reference, causal", "batched, causal", "fused, blocks", "banded"]
)
def test_8192_tokens_need_no_table_of_all_pairs(case: str) -> None:
    watched = train(*CASES[case], 8192, grad=False, heads=1)
    assert watched.peak < 4 * 8192**2 / 2


def test_the_measure_sees_a_square_and_what_autograd_keeps_of_it() -> None:
    x = torch.randn(64, 4, requires_grad=True)
    kept = measured(lambda: [(x @ x.T).softmax(-1) for _ in range(3)])
    assert kept.largest == 4 * 64**2
    # Of each product and its softmax, autograd keeps the softmax alone.
    assert 3 * 4 * 64**2 < kept.peak < 5 * 4 * 64**2
