"""T5, first and 1.1, gives the logits of `transformers`, whole and while decoding from a cache."""

from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from manyheads.attention import AttentionConfig
from manyheads.models.build import build
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP, GeGLU
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import PreNorm, RMSNorm
from manyheads.parts.positions import T5Buckets
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, texts

Version = Literal["1.0", "1.1"]
Pair = tuple[T5ForConditionalGeneration, Seq2Seq]
WIDTH, SIZE, HIDDEN = 48, 10, 80
# Longer than `reach`, so that the last bucket of all is met too.
SOURCES, TARGETS = (7, 1, 50, 12), (3, 9, 1, 45)


def stack(version: Version, *, decodes: bool) -> StackConfig:
    norm = PreNorm(RMSNorm(eps=1e-6))
    own = AttentionConfig(
        width=WIDTH,
        heads=4,
        head_size=SIZE,
        scale=1.0,
        position=T5Buckets(buckets=12, reach=30, bidirectional=not decodes),
        mask=Causal() if decodes else Full(),
    )
    cross = AttentionConfig(width=WIDTH, heads=4, head_size=SIZE, scale=1.0, keys_from="memory")
    feedforward: MLP | GeGLU = GeGLU(width=WIDTH, hidden=HIDDEN, activation="gelu_tanh")
    if version == "1.0":
        feedforward = MLP(width=WIDTH, hidden=HIDDEN, activation="relu", bias=False)
    layer = LayerConfig(
        attention=Branch(own, norm),
        cross=Branch(cross, norm) if decodes else None,
        feedforward=Branch(feedforward, norm),
    )
    return StackConfig(width=WIDTH, layers=(layer,) * 3, final_norm=RMSNorm(eps=1e-6))


def ours(version: Version) -> Seq2SeqConfig:
    tied = LanguageHead(tied=True, scale=WIDTH**-0.5)
    return Seq2SeqConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH),
        encoder=stack(version, decodes=False),
        decoder=stack(version, decodes=True),
        readout=tied if version == "1.0" else LanguageHead(tied=False),
    )


def peer_model(version: Version) -> T5ForConditionalGeneration:
    first = version == "1.0"
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            d_kv=SIZE,
            d_ff=HIDDEN,
            num_layers=3,
            num_heads=4,
            relative_attention_num_buckets=12,
            relative_attention_max_distance=30,
            feed_forward_proj="relu" if first else "gated-gelu",
            tie_word_embeddings=first,
        )
    )
    if not first:
        # `transformers` ties fresh weights even so; checkpoints of 1.1 bring a head of their own.
        model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
    copying.scramble(model)
    return model.eval()


@pytest.fixture(scope="module", params=["1.0", "1.1"])
def pair(request: pytest.FixtureRequest) -> Pair:
    pair = peer_model(request.param), build(ours(request.param))
    copying.t5(*pair)
    return pair


def alone(model: T5ForConditionalGeneration, *texts: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [
            model(source[None], decoder_input_ids=target[None]).logits[0]
            for source, target in zip(*texts, strict=True)
        ]


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    sources, targets = texts(SOURCES), texts(TARGETS, seed=1)
    with torch.no_grad():
        result = pair[1](Ragged.from_list(sources), Ragged.from_list(targets)).logits
    assert_same(result, alone(pair[0], sources, targets))


def test_one_table_serves_all_layers_of_a_stack(pair: Pair) -> None:
    tables = [name for name, _ in pair[1].named_parameters() if "table" in name]
    assert tables == [f"{side}.layers.0.attention.table.table" for side in ("encoder", "decoder")]


def test_steps_with_a_cache_give_the_logits_of_transformers(pair: Pair) -> None:
    sources, targets = texts(SOURCES), texts((36,) * len(SOURCES), seed=2)
    cache, result = pair[1].new_cache(), []
    with torch.no_grad():
        for start, stop in ((0, 1), (1, 2), (2, 30), (30, 35), (35, 36)):
            chunk = Ragged.from_list([target[start:stop] for target in targets])
            source = Ragged.from_list(sources) if start == 0 else None
            logits = pair[1](source, chunk, cache=cache).logits
            result.append(torch.stack(logits.to_list()))
    assert_same(torch.cat(result, dim=1), alone(pair[0], sources, targets))
