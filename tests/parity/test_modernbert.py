"""ModernBERT gives the logits of `transformers`, whatever its window and its global layers."""

import pytest
import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from manyheads.models.build import build
from manyheads.models.recipes import modernbert
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts


@pytest.mark.parametrize("window", [4, 12, 128])
@pytest.mark.parametrize("global_every", [1, 2, 3])
def test_logits_are_those_of_transformers(window: int, global_every: int) -> None:
    peer = ModernBertForMaskedLM(
        ModernBertConfig(
            hidden_size=48,
            num_hidden_layers=5,
            num_attention_heads=4,
            intermediate_size=72,
            vocab_size=VOCABULARY,
            local_attention=window,
            global_attn_every_n_layers=global_every,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=0,
            cls_token_id=0,
            sep_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    ours = build(
        modernbert(
            width=48,
            heads=4,
            hidden=72,
            layers=5,
            vocabulary=VOCABULARY,
            window=window,
            global_every=global_every,
        )
    )
    copying.modernbert(peer, ours)
    lengths = (7, 1, 60, 23)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts(lengths))).logits
        assert_same(result, each_alone(peer, texts(lengths)))
