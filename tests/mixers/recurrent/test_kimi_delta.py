"""Kimi delta attention equals the layer of `transformers`, token by token too."""

from typing import Any

import pytest
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from manyheads.cache import StateCache, StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.kimi_delta import KimiDelta, KimiDeltaLayer
from manyheads.ragged import Ragged
from tests.checkpoints.peer_models import randomized

CONFIG = KimiDelta(width=16, heads=3, head_size=6, convolution=3)


def peer_and_ours() -> tuple[Any, KimiDeltaLayer]:
    config = KimiLinearConfig(
        hidden_size=16,
        num_hidden_layers=1,
        linear_num_heads=3,
        linear_head_dim=6,
        linear_conv_kernel_dim=3,
    )
    peer: Any = randomized(KimiLinearDeltaAttention(config, 0))
    ours, forget = KimiDeltaLayer(CONFIG), peer.forget_gate
    weights = {
        "project": [peer.q_proj, peer.k_proj, peer.v_proj],
        "narrow": [forget.f_a_proj, peer.g_a_proj, peer.b_proj],
        "widen_dt": [forget.f_b_proj],
        "widen_gate": [peer.g_b_proj],
        "output": [peer.o_proj],
    }
    tensors = {
        f"{name}.weight": torch.cat([part.weight for part in parts])
        for name, parts in weights.items()
    }
    tensors |= {
        "convolution.weight": peer.conv1d.weight.squeeze(1),
        "dt_bias": forget.dt_bias,
        "A_log": forget.A_log.flatten(),
        "norm_weight": peer.o_norm.weight,
    }
    ours.load_state_dict(tensors)
    return peer, ours


@torch.no_grad()
def test_it_equals_the_layer_of_transformers() -> None:
    peer, ours = peer_and_ours()
    texts = [torch.randn(length, 16) for length in (70, 1, 17)]
    result = ours(Ragged.from_list(texts)).to_list()
    for text, each in zip(texts, result, strict=True):
        torch.testing.assert_close(each, peer(text[None])[0], atol=1e-5, rtol=1e-5)
    cache = StateSlot(StateCache())
    steps = [ours(Ragged.from_list([token[None]]), cache=cache).values for token in texts[2]]
    torch.testing.assert_close(torch.cat(steps), result[2], atol=1e-5, rtol=1e-5)


def test_an_impossible_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads must be at least 1, got 0"):
        KimiDelta(width=16, heads=0, head_size=6)
