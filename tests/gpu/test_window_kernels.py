"""Attention within a window by our own kernel: outputs and gradients are those of the definition.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_window_kernels.py --on cpu`.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from manyheads.kernels import choose, reference, window
from manyheads.kernels.contract import Request, Want
from manyheads.models.build import build
from manyheads.parts.masks import Causal, Full, Mask, Window
from manyheads.parts.positions import Rotary
from manyheads.ragged import Lengths, Ragged

LIMITS = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# Query heads, key heads, channels.
HEADS = {"each": (3, 3, 64), "shared": (6, 2, 32), "one": (4, 1, 128)}
MASKS = {"both": Window(20, 9), "before": Window(70), "after": Window(0, 33), "itself": Window(0)}
RAGGED = (90, 0, 1, 131, 3, 0)


@pytest.fixture(autouse=True)
def on_this_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        # The interpreter runs the same kernels, in float32.
        monkeypatch.setattr(window, "cannot", lambda *_: None)


def kinds(device: str) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if device == "cpu" else (torch.bfloat16, torch.float16)


def inputs(
    each: tuple[int, ...], heads: str, dtype: torch.dtype, device: str
) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values as parts of one projection, and a gradient of the output."""
    count, keys, size = HEADS[heads]
    draw = torch.Generator().manual_seed(1)
    joined = torch.randn(sum(each), count + 2 * keys, size, generator=draw).to(dtype)
    pull = torch.randn(sum(each), count, size, generator=draw).to(dtype)
    parts = joined.to(device).split((count, keys, keys), dim=1)
    return [part.requires_grad_() for part in parts], pull.to(device)


def request_for(each: tuple[int, ...], mask: Mask, size: int, device: str, turned: bool) -> Request:
    lengths = Lengths.of(each, device)
    rotation = Rotary(theta=500.0).rotation(lengths.positions, size) if turned else None
    return Request(
        queries=lengths,
        keys=lengths,
        mask=mask,
        scale=0.3,
        rotation=rotation,
        want=Want(lse=True),
    )


def expected_of(parts: list[Tensor], request: Request, pull: Tensor) -> list[Tensor]:
    leaves = [part.detach().double().requires_grad_() for part in parts]
    turned = leaves
    if request.rotation is not None:
        turned = list(request.rotation.turn(*leaves))
    result = reference.attend(*turned, replace(request, rotation=None))
    assert result.lse is not None
    gradients = torch.autograd.grad(result.output, leaves, pull.double())
    return [result.output, result.lse, *gradients]


def close(result: Tensor, expected: Tensor, limit: float) -> bool:
    assert result.shape == expected.shape
    # A token that sees only itself has gradients of zero, up to what is lost by rounding.
    length = max(float(expected.detach().norm()), expected.numel() ** 0.5)
    return bool((result.double() - expected).norm() <= limit * length)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", HEADS)
def test_output_and_gradients(heads: str, mask: str, turned: bool, device: str) -> None:
    for dtype in kinds(device):
        parts, pull = inputs(RAGGED, heads, dtype, device)
        request = request_for(RAGGED, MASKS[mask], parts[0].shape[2], device, turned)
        result = window.attend(*parts, request)
        assert result.output.dtype == dtype
        assert result.lse is not None
        gradients = torch.autograd.grad(result.output, parts, pull)
        values = [result.output, result.lse, *gradients]
        names = ("output", "log-sum-exp", "queries", "keys", "values")
        for name, one, other in zip(names, values, expected_of(parts, request, pull), strict=True):
            assert close(one, other, LIMITS[dtype]), (name, dtype)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(100, 60)], ids=str)
def test_wide_windows_without_a_gradient(
    mask: Mask, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyheads.kernels import triton_window

    monkeypatch.setattr(triton_window, "WIDE_FROM", 100)
    each = (300, 0, 1, 131, 64, 3, 0)
    for heads in ("each", "one"):
        parts, pull = inputs(each, heads, kinds(device)[0], device)
        request = request_for(each, mask, parts[0].shape[2], device, True)
        with torch.no_grad():
            result = window.attend(*parts, request)
        assert result.lse is not None
        expected = expected_of(parts, request, pull)
        assert close(result.output, expected[0], LIMITS[parts[0].dtype])
        assert close(result.lse, expected[1], LIMITS[parts[0].dtype])


def test_rotation_is_applied_for_kernels_that_do_not_rotate(device: str) -> None:
    parts, pull = inputs(RAGGED, "each", kinds(device)[0], device)
    request = request_for(RAGGED, Window(20, 9), 64, device, True)
    result = choose.attend(*parts, request, "reference")
    assert close(result.output, expected_of(parts, request, pull)[0], LIMITS[parts[0].dtype])


def test_part_of_the_channels_is_rotated_outside(device: str) -> None:
    parts, pull = inputs(RAGGED, "each", kinds(device)[0], device)
    request = request_for(RAGGED, Window(20, 9), 64, device, False)
    rotation = Rotary(fraction=0.5).rotation(request.queries.positions, 64)
    turned = replace(request, rotation=rotation)
    assert not window.rotates(turned, 64)
    leaves = [part.detach().requires_grad_() for part in parts]
    rotated = (rotation(leaves[0]), rotation(leaves[1]), leaves[2])
    once = window.attend(*rotated, turned).output
    assert close(once, expected_of(list(rotated), request, pull)[0], LIMITS[parts[0].dtype])


def test_two_sequences_of_a_batch_never_meet(device: str) -> None:
    parts, pull = inputs(RAGGED, "shared", kinds(device)[0], device)
    request = request_for(RAGGED, Window(20, 9), 32, device, True)
    output = window.attend(*parts, request).output
    for place in request.queries.slices():
        for gradient in torch.autograd.grad(output[place], parts, pull[place], retain_graph=True):
            assert not gradient[: place.start].any()
            assert not gradient[place.stop :].any()


def test_nothing_gives_nothing(device: str) -> None:
    for each in ((), (0, 0)):
        parts, pull = inputs(each, "each", kinds(device)[0], device)
        request = request_for(each, Window(2), 64, device, True)
        output = window.attend(*parts, request).output
        assert output.shape == (0, 3, 64)
        assert all(len(one) == 0 for one in torch.autograd.grad(output, parts, pull))


@pytest.mark.parametrize("backward", [False, True])
def test_compiled_it_serves_other_lengths_without_compiling_again(
    backward: bool, device: str
) -> None:
    if device == "cpu":
        pytest.skip("the interpreter does not run compiled models")
    model = build(
        "modernbert-base", layers=3, width=256, heads=4, hidden=256, vocabulary=99, device="cuda"
    )
    model = model.to(torch.bfloat16).train(backward)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    counter = torch._dynamo.utils.counters
    counter.clear()
    graphs = []
    for each in ((300, 41, 0, 170), (77, 512, 200), (1, 9, 640, 33, 10)):
        lengths = Lengths.of(each, device)
        batch = Ragged(torch.arange(lengths.total, device=device) % 99, lengths)
        with torch.set_grad_enabled(backward):
            result = [one(batch).hidden.values for one in (model, compiled)]
        results = [result]
        if backward:
            weights = list(model.parameters())
            pull = torch.randn_like(result[0])
            grads = (torch.autograd.grad(one, weights, pull, allow_unused=True) for one in result)
            results += [
                [eager, made]
                for eager, made in zip(*grads, strict=True)
                if eager is not None and made is not None
            ]
        for eager, made in results:
            assert (made - eager).float().norm() <= 4e-2 * eager.float().norm()
        graphs.append(counter["stats"]["unique_graphs"])
    assert graphs[-1] == graphs[1], graphs


def test_more_blocks_of_tokens_than_an_axis_of_a_grid_has(device: str) -> None:
    if device == "cpu":
        pytest.skip("the interpreter takes minutes")
    each, few = (8192,) * 513, (8192,) * 2
    tokens = sum(each)
    draw = torch.Generator(device).manual_seed(0)
    joined = torch.randn(tokens, 3, 32, device=device, dtype=torch.bfloat16, generator=draw)
    results = []
    for lengths, part in ((each, joined), (few, joined[-sum(few) :])):
        heads = part.detach().requires_grad_()
        request = request_for(lengths, Window(20, 9), 32, device, turned=True)
        output = window.attend(*heads.split((1, 1, 1), dim=1), request).output
        [back] = torch.autograd.grad(output.float().square().sum(), heads)
        results.append((output[-8192:], back[-8192:]))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
