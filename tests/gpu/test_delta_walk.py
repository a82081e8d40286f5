"""Our kernels of the delta rule: outputs, states and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_delta_walk.py --on cpu`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.mixers.recurrent.delta_recurrence import delta_in_chunks
from manyheads.ragged import Lengths

# Heads, channels of a key, channels of a value.
SHAPES = {"wider values": (2, 24, 40), "wider keys": (1, 64, 16), "widest": (1, 128, 128)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_outputs_states_and_gradients(
    shape: str, by_channel: bool, continued: bool, device: str
) -> None:
    heads, size, out = SHAPES[shape]
    lengths = Lengths.of((150, 0, 1, 64, 67), device)
    draw = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device)

    # As parts of a wider projection: tokens are further apart than their channels.
    joined = F.normalize(normal(lengths.total, 2 * heads, size), dim=-1)
    decays = (lengths.total, heads, size) if by_channel else (lengths.total, heads)
    inputs = {
        "q": joined[:, :heads],
        "k": joined[:, heads:],
        "v": normal(lengths.total, heads, out),
        "beta": normal(lengths.total, heads).sigmoid(),
        "decay": -normal(*decays).abs(),
    }
    if continued:
        inputs["state"] = normal(lengths.count, heads, size, out)
    pulls = normal(lengths.total, heads, out), normal(lengths.count, heads, size, out)
    results = []
    for by_triton in (True, False):
        learned = {name: each.detach().requires_grad_() for name, each in inputs.items()}
        arguments = [learned[name] for name in ("q", "k", "v", "beta", "decay")]
        result = delta_in_chunks(*arguments, lengths, learned.get("state"), by_triton=by_triton)
        results.append((*result, *torch.autograd.grad(result, list(learned.values()), pulls)))
    for name, one, other in zip(("output", "last", *inputs), *results, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm(), name


@pytest.mark.parametrize("by_channel", [False, True])
def test_slow_decays_over_many_chunks(by_channel: bool, device: str) -> None:
    lengths = Lengths.of((16 * 40,), device)
    draw = torch.Generator().manual_seed(5)
    q, k, v = torch.randn(3, lengths.total, 1, 16, generator=draw).to(device)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = torch.rand(lengths.total, 1, generator=draw).to(device)
    decay = -0.01 * torch.rand(q.shape if by_channel else beta.shape, generator=draw).to(device)
    results = []
    for by_triton in (True, False):
        learned = [each.clone().requires_grad_() for each in (q, k, v, beta, decay)]
        # One state for all heads: it is not stored once per head.
        state = torch.eye(16, device=device).expand(1, 1, 16, 16)
        output, _ = delta_in_chunks(*learned, lengths, state, by_triton=by_triton)
        results.append((output, *torch.autograd.grad(output, learned, v)))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("by_channel", [False, True])
def test_segments_of_long_sequences(
    by_channel: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyheads.mixers.kernels import triton_delta

    monkeypatch.setattr(triton_delta, "SEGMENT", 2)
    lengths, heads = Lengths.of((85, 0, 1, 32, 67), device), 2
    draw = torch.Generator().manual_seed(7)
    q, k, v = torch.randn(3, lengths.total, heads, 16, generator=draw).to(device)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    # Rates up to 2 turn round what is under a key.
    beta = 2 * torch.rand(lengths.total, heads, generator=draw).to(device)
    decay = -0.1 * torch.rand(q.shape if by_channel else beta.shape, generator=draw).to(device)
    state = torch.randn(lengths.count, heads, 16, 16, generator=draw).to(device)
    results = []
    for by_triton in (True, False):
        learned = [each.clone().requires_grad_() for each in (q, k, v, beta, decay, state)]
        result = delta_in_chunks(*learned[:5], lengths, learned[5], chunk=16, by_triton=by_triton)
        gradients = torch.autograd.grad(result, learned, (v, state))
        results.append((*result, *gradients))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("by_channel", [False, True])
def test_strong_decays_and_equal_keys(by_channel: bool, device: str) -> None:
    """Neither exponentials nor the triangular inverse overflow."""
    lengths = Lengths.of((100,), device)
    draw = torch.Generator().manual_seed(9)
    q, v = torch.randn(2, lengths.total, 1, 16, generator=draw).to(device)
    k = F.normalize(torch.ones_like(q), dim=-1)
    beta = torch.ones(lengths.total, 1, device=device)
    shape = q.shape if by_channel else beta.shape
    # Some tokens forget nothing, some nearly everything.
    decay = -100 * (torch.rand(shape, generator=draw) < 0.3).to(device).float()
    results = []
    for by_triton in (True, False):
        learned = [each.clone().requires_grad_() for each in (q, k, v, beta, decay)]
        output, _ = delta_in_chunks(*learned, lengths, by_triton=by_triton)
        results.append((output, *torch.autograd.grad(output, learned[:4], v)))
    for one, other in zip(*results, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("by_channel", [False, True])
def test_half_precision_stays_close(by_channel: bool, device: str) -> None:
    if device == "cpu":
        pytest.skip("Triton's interpreter cannot multiply half precision")
    lengths = Lengths.of((150, 64), device)
    q, k, v = torch.randn(3, lengths.total, 2, 64, device=device)
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    beta = torch.rand(lengths.total, 2, device=device)
    decay = -torch.rand(q.shape if by_channel else beta.shape, device=device)
    wide, state = delta_in_chunks(q, k, v, beta, decay, lengths, by_triton=False)
    narrow = [each.bfloat16() for each in (q, k, v, beta)]
    half, other = delta_in_chunks(*narrow, decay, lengths, by_triton=True)
    assert half.dtype == torch.bfloat16
    assert (half.float() - wide).norm() < 2e-2 * wide.norm()
    assert (other - state).norm() < 2e-2 * state.norm()
