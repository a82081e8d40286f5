"""Fused kernels give the outputs and gradients of the plain operations."""

import pytest
import torch
from torch import Tensor

from manyheads import Ragged, build
from manyheads.parts.feedforward import ACTIVATIONS, Activation
from manyheads.parts.positions import rotary
from manyheads.parts.positions.rotary import Rotary

KINDS: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def close(result: Tensor, expected: Tensor, limit: float) -> None:
    assert result.shape == expected.shape
    assert (result.double() - expected).norm() < limit * expected.norm()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize(("heads", "keys", "size"), [(12, 12, 64), (7, 1, 32), (32, 8, 128)])
@pytest.mark.parametrize("tokens", [1, 777])
def test_parts_turned(
    tokens: int, heads: int, keys: int, size: int, dtype: torch.dtype, device: str
) -> None:
    from manyheads.parts.positions.triton_rotary import rotated, turned

    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    joined = torch.randn(tokens, heads + 2 * keys, size, device=device, dtype=dtype)
    joined.requires_grad_()
    turn = Rotary().rotation(torch.arange(tokens, device=device), size)
    parts = joined.split((heads, keys, keys), dim=1)
    result = rotated(*parts, turn.cos, turn.sin)
    exact = joined.detach().double().requires_grad_()
    query, key, value = exact.split((heads, keys, keys), dim=1)
    expected = (turn(query), turn(key), value)
    pulls = [torch.randn_like(part) for part in result]
    [back] = torch.autograd.grad(result, joined, pulls)
    [true] = torch.autograd.grad(expected, exact, [pull.double() for pull in pulls])
    for computed, exact_part in zip((*result, back), (*expected, true), strict=True):
        close(computed, exact_part, KINDS[dtype])
    with torch.no_grad():
        close(turned(parts[0], turn.cos, turn.sin), expected[0], KINDS[dtype])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("size", [64, 256])
@torch.no_grad()
def test_first_channels_turned_without_gradients(
    size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    monkeypatch.setattr(rotary, "runs_triton", lambda _: True)
    x = torch.randn(50, 3, size + 8, device=device, dtype=dtype)[..., 8:]
    turn = Rotary(fraction=64 / size).rotation(torch.arange(50, device=device), size)
    assert turn.cos.shape[-1] == 32
    result = turn(x)
    with torch.enable_grad():
        expected = turn(x.double())
    close(result, expected, KINDS[dtype])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (300, 1152), (33, 200)])
def test_gated_halves(
    tokens: int, size: int, activation: Activation, dtype: torch.dtype, device: str
) -> None:
    from manyheads.parts.triton_glu import KINDS as NAMES
    from manyheads.parts.triton_glu import gated

    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter has no bfloat16")
    joined = 3 * torch.randn(tokens, 2 * size, device=device, dtype=dtype)
    joined.requires_grad_()
    result = gated(joined, NAMES.index(activation))
    exact = joined.detach().double().requires_grad_()
    gate, passed = exact.chunk(2, dim=1)
    expected = ACTIVATIONS[activation](gate) * passed
    pull = torch.randn_like(result)
    [back] = torch.autograd.grad(result, joined, pull)
    [true] = torch.autograd.grad(expected, exact, pull.double())
    close(result, expected, KINDS[dtype])
    close(back, true, KINDS[dtype])


@torch.no_grad()
def test_a_compiled_encoder_gives_what_it_gives_uncompiled(device: str) -> None:
    if device == "cpu":
        pytest.skip("the kernels are compiled on CUDA alone")
    shape = {"layers": 4, "width": 128, "heads": 4, "hidden": 256, "vocabulary": 90}
    model = build("modernbert-base", **shape, seed=0, device=device, dtype=torch.bfloat16).eval()
    texts = [torch.randint(90, (length,)) for length in (30, 1, 90)]
    batch = Ragged.from_list(texts).to(device)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    result, expected = compiled(batch).logits.values, model(batch).logits.values
    close(result, expected, 2e-2)
