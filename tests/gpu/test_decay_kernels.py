"""The kernels of the decaying recurrence: outputs, states and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_decay_kernels.py --on cpu`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from manyheads.mixers.performer import featurized, orthogonal_features
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.mixers.recurrent.decay_recurrence import recur_in_chunks
from manyheads.ragged import Lengths

SHAPES = {
    "one more channel": (4, 4, 64, 65),
    "shared keys": (4, 1, 16, 32),
    "features": (2, 2, 128, 33),
    "two groups": (4, 2, 40, 24),
}
# Kernels of exact float32 take too long to compile; the interpreter is always exact.
TOLERANCE = {"cuda": 2e-3, "cpu": 1e-5}


@contextmanager
def products_of_tensor_cores(yes: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if yes else "highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_outputs_states_and_gradients(
    shape: str, decays: bool, continued: bool, device: str
) -> None:
    heads, groups, size, out = SHAPES[shape]
    lengths = Lengths.of((150, 0, 1, 64, 67), device)
    draw = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device)

    # As parts of a wider projection: tokens are further apart than their channels.
    joined = normal(lengths.total, 2 * groups * size)
    inputs = {
        "q": joined[:, : groups * size].unflatten(1, (groups, size)),
        "k": joined[:, groups * size :].unflatten(1, (groups, size)),
        "v": normal(lengths.total, heads, out),
    }
    if decays:
        inputs["decay"] = -normal(lengths.total, heads).abs()
    if continued:
        inputs["state"] = normal(lengths.count, heads, size, out)
    pulls = normal(lengths.total, heads, out), normal(lengths.count, heads, size, out)
    results = []
    for by_triton in (True, False):
        learned = {name: each.detach().requires_grad_() for name, each in inputs.items()}
        arguments = [learned.get(name) for name in ("q", "k", "v", "decay")]
        state = learned.get("state")
        with products_of_tensor_cores(by_triton):
            output, last = recur_in_chunks(*arguments, lengths, state, by_triton=by_triton)
            gradients = torch.autograd.grad((output, last), list(learned.values()), pulls)
        results.append((output, last, *gradients))
    for name, one, other in zip(("output", "last", *inputs), *results, strict=True):
        assert (one - other).norm() < TOLERANCE[device] * other.norm(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_stays_close(dtype: torch.dtype, device: str) -> None:
    if device == "cpu":
        pytest.skip("Triton's interpreter cannot multiply half precision")
    lengths = Lengths.of((150, 64), device)
    q, k, v = (torch.randn(lengths.total, 2, 64, device=device) for _ in range(3))
    decay = -torch.rand(lengths.total, 2, device=device)
    wide, state = recur_in_chunks(q, k, v, decay, lengths)
    narrow = [each.to(dtype) for each in (q, k, v)]
    half, other = recur_in_chunks(*narrow, decay, lengths, by_triton=True)
    assert half.dtype == dtype
    assert (half.float() - wide).norm() < 1e-2 * wide.norm()
    assert (other - state).norm() < 1e-2 * state.norm()


@pytest.mark.parametrize("decays", [False, True])
def test_states_are_joined_over_many_chunks(decays: bool, device: str) -> None:
    from manyheads.mixers.kernels.triton_states import joined_states
    from manyheads.mixers.recurrent.decay_recurrence import _join_states

    lengths = Lengths.of((1100 * 4, 0, 3, 70 * 4 - 1), device)
    chunks = ChunkLayout.of(lengths, 4)
    draw = torch.Generator().manual_seed(5)
    shape = (chunks.counts.total, 2, 3, 5)
    whole = -torch.rand(shape[:2], generator=draw) if decays else torch.zeros(shape[:2])
    before = torch.randn(lengths.count, *shape[1:], generator=draw)
    inputs = [torch.randn(shape, generator=draw), whole, before]
    pulls = [torch.randn(each.shape, generator=draw).to(device) for each in (inputs[0], before)]
    results = []
    for by_triton in (True, False):
        learned = [each.to(device).requires_grad_() for each in inputs]
        if by_triton:
            result = joined_states(*learned, chunks.counts, decays)
        else:
            result = _join_states(*learned, chunks)
        wanted = learned if decays else [learned[0], learned[2]]
        results.append((*result, *torch.autograd.grad(result, wanted, pulls)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("continued", [False, True])
def test_features_of_performer(continued: bool, device: str) -> None:
    lengths = Lengths.of((70, 0, 1, 33), device)
    draw = torch.Generator().manual_seed(7)
    features = orthogonal_features(3, 20, 12, draw).to(device)
    joined = torch.randn(lengths.total, 2 * 3 * 12, generator=draw).to(device)
    query, key = (part.unflatten(1, (3, 12)) for part in joined.chunk(2, dim=1))
    before = torch.randn(lengths.count, 3, generator=draw).to(device) if continued else None
    pulls = [torch.randn(lengths.total, 3, 20, generator=draw).to(device) for _ in range(2)]
    results = []
    for by_triton in (True, False):
        learned = [query.detach().requires_grad_(), key.detach().requires_grad_()]
        options = {"causal": True, "by_triton": by_triton}
        with products_of_tensor_cores(by_triton):
            result = featurized(*learned, features, lengths, before, **options)
            gradients = torch.autograd.grad(result[:2], learned, pulls)
        results.append((*result, *gradients))
    for one, other in zip(*results, strict=True):
        bound = TOLERANCE[device]
        torch.testing.assert_close(one, other, rtol=10 * bound, atol=10 * bound)
