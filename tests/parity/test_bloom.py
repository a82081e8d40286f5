"""BLOOM, with ALiBi, gives the logits of `transformers` for any number of heads."""

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from manyheads.attention import AttentionConfig
from manyheads.models.build import build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, PreNorm
from manyheads.parts.positions import Alibi
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts


@pytest.mark.parametrize("heads", [4, 6])
def test_logits_are_those_of_transformers(heads: int) -> None:
    peer = BloomForCausalLM(
        BloomConfig(
            vocab_size=VOCABULARY,
            hidden_size=48,
            n_layer=2,
            n_head=heads,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    attention = AttentionConfig(width=48, heads=heads, position=Alibi(), mask=Causal(), bias="all")
    layer = LayerConfig(
        attention=Branch(attention, PreNorm(LayerNorm())),
        feedforward=Branch(MLP(width=48, hidden=192, activation="gelu_tanh"), PreNorm(LayerNorm())),
    )
    ours = build(
        DecoderConfig(
            embedding=Embedding(vocabulary=VOCABULARY, width=48, norm=LayerNorm()),
            stack=StackConfig(width=48, layers=(layer,) * 2, final_norm=LayerNorm()),
            readout=LanguageHead(),
        )
    )
    copying.bloom(peer, ours)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts())).logits
    assert_same(result, each_alone(peer, texts()))
