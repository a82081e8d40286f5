"""Compiled whole, without a graph break, a model gives what it gives uncompiled."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.mixers import S4D, Mamba
from manyheads.models.build import build
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import ClassHead
from manyheads.models.recipes import ModelConfig
from manyheads.parts.feedforward import GeGLU
from manyheads.parts.masks import Causal, GlobalTokens, Window
from manyheads.parts.norms import PostNorm, PreNorm, RMSNorm, SandwichNorm
from manyheads.parts.positions import Alibi, Learned, Rotary, Shaw, Sinusoidal, T5Buckets
from tests.compiled import keep_einops_whole
from tests.models.zoo import (
    EVERY_GATE,
    EXPERTS,
    WIDTH,
    decoder,
    encoder,
    ids,
    images,
    layer,
    own,
    seq2seq,
    values,
    vision,
)

pytestmark = pytest.mark.shapes_unchecked


def assert_compiles(config: ModelConfig, *inputs: Any) -> None:
    """The same hidden states, logits and gradients, to the last few bits."""
    torch._dynamo.reset()
    result = []
    for compiled in (True, False):
        model = build(config, seed=0)
        run: Any = model
        if compiled:
            backend = "aot_eager_default_partitioner"
            run = torch.compile(model, fullgraph=True, backend=backend)
        output = run(*inputs)
        hidden, logits = values(output.hidden), values(output.logits)
        extra = [term for losses in output.router for term in (losses.balance, losses.z)]
        (logits.square().sum() + sum(extra)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        result.append([hidden, logits, *extra, *gradients])
    assert len(result[0]) > 4
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max())
        )


# A process of its own, a compiler to start and every frame that it traces are dear, so that there
# is one test, and each part stands in one layer alone.
def test_batches() -> None:
    keep_einops_whole()
    batch = ids((9, 2))
    reads = encoder(
        layer(own(position=Rotary(), mask=Window(1, 1)), GeGLU(width=WIDTH, hidden=24)),
        layer(own(mask=Window(1, 1) | GlobalTokens((0,))), None, norm=PostNorm()),
        layer(own(position=T5Buckets(buckets=8, reach=9), scale=1.0), None),
        position=Learned(count=9),
        types=2,
    )
    kernels = {choice.kernel for _, choice in build(reads).explain_kernels(batch).choices}
    assert kernels == {"banded", "batched"}
    assert_compiles(reads, batch)
    writes = decoder(
        layer(own(mask=Window(2), position=Rotary(), kv_heads=2, gates=EVERY_GATE), EXPERTS),
        layer(
            own(
                mask=Causal(),
                position=Alibi(),
                query_norm=RMSNorm(),
                key_norm=RMSNorm(centered=True),
            ),
            replace(EXPERTS, shared=8, shared_gate="sigmoid"),
            norm=PreNorm(RMSNorm(centered=True)),
        ),
        layer(
            own(mask=Causal(), position=Shaw(reach=2), sink="learned"),
            None,
            norm=SandwichNorm(RMSNorm()),
        ),
    )
    mixers = (
        Mamba(width=WIDTH, inner=6, state_size=2, dt_rank=1),
        S4D(width=WIDTH, state_size=2),
    )
    mixes = [LayerConfig(attention=None, mixer=Branch(each), feedforward=None) for each in mixers]
    assert_compiles(writes, batch)
    assert_compiles(decoder(*mixes), batch)
    sees = vision(layer(own(kv_heads=2), None), readout=ClassHead(classes=3, pool="mean"))
    assert_compiles(sees, images(((8, 8), (4, 12))))
    # Rectangles are made ragged at one door, which the two stacks here go through.
    rectangle = torch.stack(ids((4, 4)).to_list())
    cross = layer(own(mask=Causal()), None, cross=own(keys_from="memory", kv_heads=1))
    assert_compiles(
        seq2seq([layer(None)], [cross], position=Sinusoidal()), rectangle, rectangle[:, :3]
    )
    assert_compiles(vision(layer(feedforward=None)), torch.stack(images(((8, 8), (8, 8)))))
