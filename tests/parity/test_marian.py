"""Marian gives the logits of `transformers`, whole and while decoding from a cache."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import MarianConfig, MarianMTModel

from manyheads.models.build import build
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import transformer
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, texts

Pair = tuple[MarianMTModel, Seq2Seq]
SOURCES, TARGETS = (7, 1, 23, 12), (3, 9, 1, 14)


def with_biases(stack: StackConfig) -> StackConfig:
    def biased(branch: Branch | None) -> Branch | None:
        return branch and replace(branch, inner=replace(branch.inner, bias="all"))

    def layer(config: LayerConfig) -> LayerConfig:
        return replace(config, attention=biased(config.attention), cross=biased(config.cross))

    return replace(stack, layers=tuple(map(layer, stack.layers)))


def marian() -> Seq2SeqConfig:
    plain = transformer(
        width=48, heads=4, hidden=80, layers=2, vocabulary=VOCABULARY, layout="halves"
    )
    return replace(
        plain,
        encoder=with_biases(plain.encoder),
        decoder=with_biases(plain.decoder),
        readout=LanguageHead(tied=True, bias=True),
    )


@pytest.fixture(scope="module")
def pair() -> Pair:
    peer = MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY,
            d_model=48,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=80,
            decoder_ffn_dim=80,
            max_position_embeddings=64,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=1,
            forced_eos_token_id=1,
            decoder_start_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    peer.final_logits_bias.copy_(torch.randn(1, VOCABULARY))
    ours = build(marian())
    copying.marian(peer, ours)
    return peer, ours


def alone(peer: MarianMTModel, sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [
            peer(source[None], decoder_input_ids=target[None]).logits[0]
            for source, target in zip(sources, targets, strict=True)
        ]


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    peer, ours = pair
    sources, targets = texts(SOURCES), texts(TARGETS, seed=1)
    with torch.no_grad():
        result = ours(Ragged.from_list(sources), Ragged.from_list(targets)).logits
    assert_same(result, alone(peer, sources, targets))


def test_steps_with_a_cache_give_the_logits_of_transformers(pair: Pair) -> None:
    peer, ours = pair
    sources, targets = texts(SOURCES), texts((6,) * len(SOURCES), seed=2)
    cache, result = ours.new_cache(), []
    with torch.no_grad():
        for step in range(6):
            token = Ragged.from_list([target[step : step + 1] for target in targets])
            source = Ragged.from_list(sources) if step == 0 else None
            result.append(ours(source, token, cache=cache).logits.values)
    assert_same(torch.stack(result, dim=1), alone(peer, sources, targets))
