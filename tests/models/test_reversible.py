"""Layers on two residual streams: their equations, the lens on them, and what they refuse."""

import pytest
import torch

from manyheads import AttentionConfig, lens, surgery
from manyheads.errors import ConfigError, InputError
from manyheads.mixers.lsh_attention import LshAttention
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import MLP, Axial, Causal, LayerNorm, PostNorm
from manyheads.ragged import Ragged
from manyheads.taps import Head

WIDTH = 12
TEXTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11, 12, 13]]
ATTENDS = Branch(AttentionConfig(width=WIDTH, heads=2, mask=Causal()))
FEEDFORWARD = Branch(MLP(width=WIDTH, hidden=20))
LSH = LayerConfig(
    attention=None,
    mixer=Branch(LshAttention(width=WIDTH, heads=2, chunk=4)),
    feedforward=FEEDFORWARD,
    residual="reversible",
)
ATTENTION = LayerConfig(attention=ATTENDS, feedforward=FEEDFORWARD, residual="reversible")


def config(*layers: LayerConfig, tied: bool = False) -> DecoderConfig:
    position = Axial(rows=4, columns=5, row_size=4, column_size=8)
    return DecoderConfig(
        embedding=Embedding(vocabulary=30, width=WIDTH, position=position),
        stack=StackConfig(width=WIDTH, layers=layers, final_norm=LayerNorm()),
        readout=LanguageHead(tied=tied),
    )


@pytest.fixture(scope="module")
def model() -> Decoder:
    made = build(config(ATTENTION, LSH, ATTENTION), seed=0)
    assert isinstance(made, Decoder)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made.eval()


def test_each_sublayer_reads_one_stream_and_writes_to_the_other(model: Decoder) -> None:
    layer = model.stack.layers[2]
    assert isinstance(layer, Layer)
    assert layer.attention is not None
    assert layer.feedforward is not None
    batch = Ragged.from_list([torch.randn(6, WIDTH), torch.randn(3, WIDTH)])
    first, second = batch.values, torch.randn(9, WIDTH)
    with torch.no_grad():
        result, _ = layer(batch.with_values(torch.cat([first, second], -1)))
        read = batch.with_values(layer.attention_residual.norm(second))
        first = first + layer.attention(read).values
        read = batch.with_values(layer.feedforward_residual.norm(first))
        second = second + layer.feedforward(read.values, read, None)
    torch.testing.assert_close(result.values, torch.cat([first, second], -1))


def test_ablation_equals_pruning_in_every_layer(model: Decoder) -> None:
    heads = [Head(layer, head) for layer in (0, 2) for head in range(2)]
    result = lens.ablate(model, TEXTS, replace_with="zero", progress=False)["metric"]
    for head in heads:
        pruned = surgery.prune(model, [head])
        expected = lens.ablate(pruned, TEXTS, progress=False).baseline
        assert result.of(head) == pytest.approx(expected, abs=1e-5)
    order = lens.ablate_in_order(model, TEXTS, heads, replace_with="zero", progress=False)
    both = surgery.prune(model, heads[:3])
    expected = lens.ablate(both, TEXTS, progress=False).baseline
    assert order.steps[2].value == pytest.approx(expected, abs=1e-5)


def test_the_whole_way_from_the_embeddings_is_attributed(model: Decoder) -> None:
    assert lens.integrate_inputs(model, TEXTS[:1], steps=64).completeness < 0.05


def test_what_needs_one_stream_is_refused(model: Decoder) -> None:
    for function in (lens.attribute_logits, lens.logit_lens):
        with pytest.raises(InputError, match="two residual streams"):
            function(model, TEXTS)
    with pytest.raises(InputError, match="two residual streams"):
        lens.key_value_memories(model)
    assert "stream" in lens.kinds(model, progress=False).missing["copying"]
    with pytest.raises(InputError, match="two residual streams"):
        lens.attention_rollout(model, TEXTS)


def test_what_does_not_fit_is_refused() -> None:
    serial = LayerConfig(attention=ATTENDS, feedforward=FEEDFORWARD)
    with pytest.raises(ConfigError, match="reversible"):
        config(ATTENTION, serial)
    with pytest.raises(ConfigError, match=r"24.*12"):
        config(ATTENTION, tied=True)
    with pytest.raises(ConfigError, match="PostNorm"):
        LayerConfig(
            attention=Branch(ATTENDS.inner, PostNorm()), feedforward=None, residual="reversible"
        )
    with pytest.raises(ConfigError, match=r"6.*6.*8"):
        Embedding(
            vocabulary=9, width=8, position=Axial(rows=2, columns=2, row_size=6, column_size=6)
        )


def test_positions_end(model: Decoder) -> None:
    with pytest.raises(InputError, match=r"21.*20"):
        model(torch.zeros(1, 21, dtype=torch.long))
