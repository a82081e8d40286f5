"""Four-bit bases: the codes of bitsandbytes, and gradients that pass through them."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyheads import build, save
from manyheads.errors import ConfigError
from manyheads.surgery import LoraConfig, adapt, delete_adapter, dequantize, merge, quantize
from manyheads.surgery.lora.quantization import QuantizationLevels, Quantized, pack, unpack
from tests.surgery.families import shaken

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(64, 256), (256, 384), (33, 70)])
def test_the_codes_are_those_of_bitsandbytes(shape: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import bitsandbytes.functional as peer

    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, state = peer.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    packed = pack(weight)
    assert torch.equal(packed.codes[: codes.numel()], codes.flatten())
    result = unpack(packed, QuantizationLevels.on(CPU), shape)
    expected = peer.dequantize_4bit(codes, state)
    # A scale that lies between two of its levels may fall to either.
    assert torch.isclose(result, expected, atol=1e-5).float().mean() > 0.99
    torch.testing.assert_close(result, expected, atol=0.05, rtol=0)


def test_nothing_is_lost_of_numbers_on_levels_and_zeros_stay() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 0], weight[1, 1] = 2.0, -2.0
    result = unpack(pack(weight), QuantizationLevels.on(CPU), (3, 64))
    torch.testing.assert_close(result, weight, atol=1e-2, rtol=0)


def test_it_computes_with_what_the_codes_stand_for() -> None:
    linear = nn.Linear(70, 33)
    small = Quantized(linear)
    plain = nn.Linear(70, 33)
    plain.load_state_dict({"weight": small.weight, "bias": linear.bias})
    x = torch.randn(5, 70)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(small(one), plain(other))
    small(one).square().sum().backward()
    plain(other).square().sum().backward()
    torch.testing.assert_close(one.grad, other.grad)
    stored = sum(each.nbytes for name, each in small.state_dict().items() if name != "bias")
    assert stored < 0.56 * linear.weight.numel() + 8


def test_a_change_of_type_rounds_no_scale() -> None:
    small = Quantized(nn.Linear(64, 64))
    exact = small.weight
    half = small.to(torch.bfloat16)
    assert half.weight.dtype == torch.bfloat16
    assert torch.equal(half.weight, exact.to(torch.bfloat16))
    assert half(torch.randn(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


def gpt() -> Any:
    shape = {"layers": 2, "width": 32, "heads": 4, "vocabulary": 50, "dropout": 0.0}
    return build("gpt2", **shape, seed=0)


def test_adapters_learn_on_four_bits(tmp_path: Path) -> None:
    model, ids = gpt(), torch.arange(12)[None]
    before = model(ids).logits
    assert quantize(model) > 0
    rounded = model(ids).logits
    assert 0 < (rounded - before).abs().max() < 0.2
    adapt(model, LoraConfig(targets=("query", "output", "expand"), heads=()))
    assert torch.equal(model(ids).logits, rounded)
    losses = []
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(ids).logits[0, :-1].float(), ids[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    with pytest.raises(ConfigError, match=r"four-bit weights.*dequantize"):
        merge(model)
    with pytest.raises(ConfigError, match=r"surgery\.delete_adapter"):
        dequantize(model)
    delete_adapter(model)
    with pytest.raises(ConfigError, match=r"surgery\.dequantize"):
        save(model, tmp_path / "model")
    dequantize(model)
    torch.testing.assert_close(model(ids).logits, rounded)
    save(model, tmp_path / "model")


def test_a_model_with_adapters_is_not_quantized() -> None:
    model = gpt()
    adapt(model, LoraConfig())
    shaken(model)
    with pytest.raises(ConfigError, match="has adapters: quantize first"):
        quantize(model)
