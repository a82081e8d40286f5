"""The kernels of the short convolution: outputs, tails and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_convolution_kernels.py --on cpu`.
"""

import pytest
import torch
from torch import Tensor

from manyheads.mixers.recurrent.short_convolution import ShortConvolution
from manyheads.ragged import Lengths, Ragged

LENGTHS = {
    "shorter than the window": (150, 0, 1, 2, 3, 64, 67),
    "empty at both ends": (0, 5, 1, 0),
    "one token each": (1, 1, 1),
    "one sequence": (130,),
}
# Channels, window, and whether tokens are further apart than their channels.
SHAPES = {
    "part of a projection": (150, 4, True),
    "whole blocks": (128, 3, False),
    "no window": (8, 1, True),
    "one channel": (1, 2, False),
}


def normal(*sizes: int, device: str, seed: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=draw).to(device)


def convolution(channels: int, size: int, bias: bool, device: str) -> ShortConvolution:
    module = ShortConvolution(channels, size, bias=bias)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = normal(*parameter.shape, device="cpu", seed=seed)
    return module.to(device)


def part_of_wider(tokens: int, channels: int, device: str) -> Tensor:
    """As part of a projection: tokens are further apart than their channels."""
    return normal(tokens, channels + 24, device=device)[:, 8:-16]


@pytest.mark.parametrize("each", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("continued", [False, True])
def test_outputs_tails_and_gradients(
    each: str, shape: str, bias: bool, continued: bool, device: str
) -> None:
    channels, size, strided = SHAPES[shape]
    lengths = Lengths.of(LENGTHS[each], device)
    module = convolution(channels, size, bias, device)
    x = part_of_wider(lengths.total, channels, device)
    x = x if strided else x.contiguous()
    tails = lengths.count, size - 1, channels
    before = normal(*tails, device=device, seed=5) if continued else None
    pulls = normal(*x.shape, device=device, seed=6), normal(*tails, device=device, seed=7)
    results = []
    for by_triton in (True, False):
        tokens = x.detach().requires_grad_()
        output, last = module(Ragged(tokens, lengths), before, by_triton=by_triton)
        learned = [tokens, *module.parameters()]
        results.append((output, last, *torch.autograd.grad((output, last), learned, pulls)))
    names = ("output", "tail", "tokens", "weight", "bias")
    for name, one, other in zip(names[: 4 + bias], *results, strict=True):
        assert one.shape == other.shape, name
        assert (one - other).norm() <= 1e-5 * other.norm(), name
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("continued", [False, True])
def test_a_sequence_of_nan_leaves_the_others_alone(continued: bool, device: str) -> None:
    lengths = Lengths.of((5, 70, 1, 2), device)
    module = convolution(24, 4, True, device)
    x = normal(lengths.total, 24, device=device)
    before = normal(lengths.count, 3, 24, device=device) if continued else None
    results = []
    for broken in (False, True):
        tokens, front = x.clone(), None if before is None else before.clone()
        if broken:
            tokens[5:75] = torch.nan
            if front is not None:
                front[1] = torch.nan
        tokens.requires_grad_()
        output, last = module(Ragged(tokens, lengths), front, by_triton=True)
        (gradient,) = torch.autograd.grad((output, last), tokens, (x, torch.ones_like(last)))
        results.append((output, last, gradient))
    whole, other = results
    for index in (0, 2):
        assert other[index][5:75].isnan().any()
        assert torch.equal(whole[index][:5], other[index][:5])
        assert torch.equal(whole[index][75:], other[index][75:])
    kept = [0, 2, 3]
    assert torch.equal(whole[1][kept], other[1][kept])


def test_parts_of_a_sequence_give_the_whole(device: str) -> None:
    module, x = convolution(40, 4, True, device), normal(9, 40, device=device)
    expected, tail = module(Ragged(x, Lengths.of((9,), device)), by_triton=True)
    outputs, last = [], None
    for part in x.split((1, 1, 5, 2)):
        lengths = Lengths.of((len(part),), device)
        output, last = module(Ragged(part, lengths), last, by_triton=True)
        outputs.append(output)
    assert torch.equal(torch.cat(outputs), expected)
    assert torch.equal(last, tail)


def test_gradients_are_the_same_every_time(device: str) -> None:
    lengths = Lengths.of((300, 41), device)
    module, x = convolution(140, 4, True, device), normal(341, 140, device=device)
    results = []
    for _ in range(2):
        output, _ = module(Ragged(x, lengths), by_triton=True)
        results.append(torch.autograd.grad(output, list(module.parameters()), x))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_tokens_before_that_learn_get_their_gradient(device: str) -> None:
    lengths = Lengths.of((2, 5), device)
    module, x = convolution(8, 4, True, device), normal(7, 8, device=device)
    before = normal(2, 3, 8, device=device, seed=5).requires_grad_()
    gradients = []
    for by_triton in (True, False):
        output, _ = module(Ragged(x, lengths), before, by_triton=by_triton)
        gradients.append(torch.autograd.grad(output, before, x)[0])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["half", "float32"])
def test_half_precision_stays_close(dtype: torch.dtype, parameters: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("half precision is tested on CUDA")
    lengths = Lengths.of((150, 0, 2, 64), device)
    module = convolution(136, 4, True, device)
    x = part_of_wider(lengths.total, 136, device).to(dtype)
    before = normal(lengths.count, 3, 136, device=device, seed=5).to(dtype)
    pull = normal(*x.shape, device=device, seed=6).to(dtype)
    results = []
    for wide in (True, False):
        if not wide and parameters == "half":
            module.to(dtype)
        tokens = x.float() if wide else x.detach()
        tokens.requires_grad_()
        output, last = module(Ragged(tokens, lengths), before, by_triton=not wide)
        assert output.dtype == last.dtype == tokens.dtype
        learned = [tokens, *module.parameters()]
        gradients = torch.autograd.grad(output, learned, pull.to(output.dtype))
        assert [each.dtype for each in gradients] == [each.dtype for each in learned]
        results.append((output, last, *gradients))
    for expected, half in zip(*results, strict=True):
        assert (half.float() - expected).norm() < 1e-2 * expected.norm()
