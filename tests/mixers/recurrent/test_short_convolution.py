"""The short convolution equals a loop over tokens; its kernels are compared in tests/gpu."""

import pytest
import torch

from manyheads.mixers.recurrent.short_convolution import ShortConvolution, naive_short_convolution
from manyheads.ragged import Lengths, Ragged


@pytest.mark.parametrize("each", [(9,), (3, 0, 17, 1)])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("continued", [True, False])
def test_it_equals_the_loop_over_tokens(
    each: tuple[int, ...], size: int, bias: bool, continued: bool
) -> None:
    lengths = Lengths.of(each)
    module, x = ShortConvolution(5, size, bias=bias), torch.randn(lengths.total, 5)
    if module.bias is not None:
        torch.nn.init.normal_(module.bias)
    before = torch.randn(len(each), size - 1, 5) * continued
    output, tail = module(Ragged(x, lengths), before if continued else None)
    expected = naive_short_convolution(Ragged(x, lengths), module.weight, module.bias, before)
    torch.testing.assert_close(output, expected)
    for text, front, last in zip(Ragged(x, lengths).to_list(), before, tail, strict=True):
        assert torch.equal(last, torch.cat([front, text])[len(text) :])
