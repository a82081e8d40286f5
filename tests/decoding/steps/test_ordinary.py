"""Which decoders are ordinary, and why the others are not."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from manyheads import build
from manyheads.decoding.steps.ordinary import DecoderWeights, why_not_ordinary
from manyheads.models.readout import ClassHead, ReadoutTransform
from tests.models import zoo

ORDINARY = {
    "gpt2",
    "sinusoidal",
    "llama",
    "one key head",
    "window",
    "windows and whole",
    "normed heads",
    "parallel",
}
REASONS = {
    "alibi": "layer 0 has a position bias, Alibi",
    "t5": "T5Buckets",
    "shaw": "Shaw",
    "gates": "gates",
    "control gates": "gates, a sink or scaled heads; layer 0 norms the outputs of its heads",
    "sinks": "sink",
    "experts": "experts",
    "both norms": "pre-norm",
    "normed outputs": "norms the queries of all heads together",
    "capped": "the readout is not a plain language head; layer 0 caps its scores",
    "uneven": "layer 1 is not made of self-attention and a feed-forward",
}


def reasons(model: object) -> str:
    return "; ".join(why_not_ordinary(model))


@pytest.mark.parametrize("name", sorted(ORDINARY))
def test_ordinary_decoders_give_no_reason(name: str) -> None:
    assert not reasons(zoo.small(zoo.DECODERS[name]))


@pytest.mark.parametrize("name", REASONS)
def test_other_decoders_say_what_sets_them_apart(name: str) -> None:
    assert REASONS[name] in reasons(zoo.small(zoo.DECODERS[name]))


def test_masks_kernels_and_readouts_of_their_own_are_named() -> None:
    def one_layer(**changes: Any) -> Any:
        return zoo.decoder(zoo.writes(**changes))

    assert "GlobalTokens" in reasons(build(one_layer(mask=zoo.Causal() & zoo.GlobalTokens((0,)))))
    assert "reference" in reasons(build(one_layer(kernel="reference")))
    assert "shares keys unevenly" in reasons(build(one_layer(kv_heads=(3, 1))))
    for readout in (ClassHead(classes=3), zoo.LanguageHead(transform=ReadoutTransform())):
        assert "language head" in reasons(build(replace(one_layer(), readout=readout)))


def test_models_that_are_not_decoders_are_named() -> None:
    assert reasons(zoo.small(zoo.ENCODERS["bert"])) == "Encoder is not a decoder"
    assert "Seq2Seq" in reasons(zoo.small(zoo.SEQ2SEQS["t5"]))


def test_hooks_and_projections_of_another_class_must_be_called() -> None:
    model: Any = build(zoo.DECODERS["gpt2"], seed=0)
    handle = model.stack.layers[1].register_forward_pre_hook(lambda *_: None)
    assert reasons(model) == "stack.layers.1 has a forward hook"
    handle.remove()
    assert not reasons(model)

    class Doubled(nn.Linear):
        """Computes more than a product with its weight."""

    feedforward = model.stack.layers[0].feedforward
    feedforward.expand = Doubled(zoo.WIDTH, 40)
    assert "feedforward.expand is a Doubled" in reasons(model)
    feedforward.expand = nn.Sequential(nn.Linear(zoo.WIDTH, 40))
    assert "feedforward.expand is a Sequential" in reasons(model)


def test_weights_are_those_of_the_modules() -> None:
    model = zoo.small(zoo.DECODERS["normed heads"])
    weights = DecoderWeights.of(model)
    first = model.stack.layers[0]
    assert weights.vocabulary is model.embedding.tokens.weight
    assert weights.layers[0].project is first.attention.project
    assert weights.layers[0].query_norm is first.attention.query_norm
    assert DecoderWeights.of(zoo.small(zoo.DECODERS["llama"])).layers[0].query_norm is None
