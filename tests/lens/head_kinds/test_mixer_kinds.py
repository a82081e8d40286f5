"""Kinds of the heads of a mixer whose weights were set by hand."""

import torch

from manyheads import lens
from manyheads.mixers.recurrent.mamba2 import Mamba2, Mamba2Layer
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.taps import Head

WORDS = 40


@torch.no_grad()
def planted() -> Decoder:
    """Two heads that compare tokens: with the token before each key, and with each key itself.

    The short convolution shifts the keys of the first head by one token, so that it finds what
    came after the copies of a token: an induction head in a single layer.
    """
    mixer = Mamba2(width=WORDS, heads=2, head_size=4, state_size=WORDS, groups=2)
    branch = Branch(mixer, PreNorm(NoNorm()))
    model = build(
        DecoderConfig(
            embedding=Embedding(vocabulary=WORDS, width=WORDS),
            stack=StackConfig(
                width=WORDS, layers=(LayerConfig(attention=None, mixer=branch, feedforward=None),)
            ),
            readout=LanguageHead(),
        ),
        seed=0,
    )
    assert isinstance(model, Decoder)
    layer = model.stack.layers[0].mixer
    assert isinstance(layer, Mamba2Layer)
    model.embedding.tokens.weight.copy_(10 * torch.eye(WORDS))
    _, channels, heads = layer.sizes
    first = channels - 4 * WORDS + layer.sizes[0]
    layer.project.weight[first : first + 4 * WORDS] = torch.eye(WORDS).repeat(4, 1)
    layer.project.weight[-heads:] = 0
    # Hardly anything is forgotten.
    layer.A_log.fill_(-12.0)
    layer.convolution.weight[-4 * WORDS :] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    layer.convolution.weight[-4 * WORDS : -3 * WORDS] = torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert layer.convolution.bias is not None
    layer.convolution.bias.zero_()
    return model.eval()


def test_heads_of_a_mixer_get_the_kinds_of_their_patterns() -> None:
    result = lens.kinds(planted(), sequences=10, progress=False)
    assert result.best(Head(0, 0)) == "induction"
    assert {label.kind for label in result.of(Head(0, 1))} >= {"duplicate-token", "self"}
    assert "mixers" in result.missing["copying"]
