"""Random small models and texts: every statistic is that of the explicit pattern."""

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from manyheads.attention import AttentionConfig
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.build import build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Mask, Prefix, Window
from manyheads.parts.norms import PreNorm, RMSNorm
from manyheads.parts.positions import (
    Alibi,
    AttentionPosition,
    Learned,
    NoPosition,
    Rotary,
    Shaw,
    T5Buckets,
)
from manyheads.ragged import Ragged
from tests.lens.oracle import by_definition

VOCABULARY, POSITIONS = 17, 40
# Large weights make large scores, whose rounding the softmax turns into small changes of weights.
TOLERANCE = 1e-3


def every_statistic(random: Random, _: Path) -> str:
    """Means and errors of all measures, against loops over queries."""
    model, texts = _model(random), _texts(random)
    classes = {"low": range(4), "none": ()}
    offsets = tuple(random.sample([-5, -3, -2, 2, 4], 2))
    limit = random.choice([1, 16, 4096])
    result = statistics(
        model, texts, classes=classes, offsets=offsets, batch_tokens=limit, progress=False
    )
    inputs = ModelInputs(ids=Ragged.from_list([torch.tensor(text) for text in texts]))
    expected = by_definition(model, inputs, classes, offsets)
    start = 0
    for block in blocks_of(model):
        heads = slice(start, start + block.heads)
        for name in result.names:
            mean = expected.mean(block, name)
            close(result.means[name][heads], mean, f"{name} of {block}")
            if len(texts) > 1 and not _is_step(name):
                close(result.errors[name][heads], expected.error(block, name), f"{name} error")
        start += block.heads
    assert {name for _, name in expected.values} <= set(result.names)
    return "equal"


def order_of_texts(random: Random, _: Path) -> str:
    """Texts in another order and in other batches give the same."""
    model, texts = _model(random), _texts(random)
    one = statistics(model, texts, progress=False)
    random.shuffle(texts)
    limit = random.choice([1, 7, 64])
    other = statistics(model, texts, batch_tokens=limit, progress=False)
    for name in one.names:
        close(one.means[name], other.means[name], name)
        if not _is_step(name):
            close(one.errors[name], other.errors[name], f"{name} error")
    return "equal"


def odd_texts(random: Random, _: Path) -> str:
    """One token, one token repeated, an empty text, an unknown token: an answer or an error."""
    model = _model(random)
    texts: list[list[int]] = random.choice(
        [
            [[random.randrange(VOCABULARY)]],
            [[3] * random.randint(2, POSITIONS)],
            [[1], [2, 2], [5]],
            [[1, 2], []],
            [[]],
            [],
            [[VOCABULARY + random.randint(0, 99)]],
            [[-1, 2]],
            [[1] * (POSITIONS + random.randint(1, 5))],
        ]
    )
    result = statistics(model, texts, progress=False)
    _plausible(result)
    return "equal"


def labels(random: Random, _: Path) -> str:
    """Random weights have no kinds but what their parts force; labels carry their evidence."""
    model = _model(random, scale=1.0)
    result = kinds(
        model, sequences=random.choice([1, 2, 5, 7]), seed=random.randrange(99), progress=False
    )
    for own in result.labels.values():
        for label in own:
            assert label.kind not in ("induction", "duplicate-token", "copying"), label
            assert label.score > label.threshold
            assert label.samples > 0
            assert label.draws is None or 2 * label.draws[0] > label.draws[1]
    assert set(result.nearest) <= {head for head, own in result.labels.items() if not own}
    return "equal"


def close(result: np.ndarray, expected: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(result, expected, atol=TOLERANCE, rtol=5e-3, err_msg=name)


def _is_step(name: str) -> bool:
    """A mean of zeros and ones may jump where a weight is rounded."""
    return name == "sink" or name.endswith("_closed")


def _plausible(result: Statistics) -> None:
    for name, values in result.means.items():
        known = values[~np.isnan(values)]
        assert np.isfinite(known).all(), name
        if name.startswith(("on_", "first", "previous", "self", "next", "induction", "max")):
            assert (known >= -1e-6).all(), name
            assert (known <= 1 + 1e-5).all(), name


def _texts(random: Random) -> list[list[int]]:
    longest = random.choice([1, 3, 12, 30])
    few = random.choice([2, VOCABULARY])
    return [
        [random.randrange(few) for _ in range(random.randint(1, longest))]
        for _ in range(random.randint(1, 6))
    ]


def _model(random: Random, scale: float | None = None) -> Any:
    """Any mask, position, gate, sink and number of key heads, with weights of any size."""
    heads = random.choice([1, 2, 4])
    size = random.choice([4, 8])
    width = random.choice([8, 16])
    causal = random.random() < 0.5
    layers = [
        LayerConfig(
            attention=Branch(_attention(random, width, heads, size, causal), PreNorm(RMSNorm())),
            feedforward=None,
        )
        for _ in range(random.choice([1, 2]))
    ]
    position = Learned(count=POSITIONS) if random.random() < 0.5 else NoPosition()
    kind = DecoderConfig if causal else EncoderConfig
    config = kind(
        embedding=Embedding(vocabulary=VOCABULARY, width=width, position=position),
        stack=StackConfig(width=width, layers=tuple(layers), final_norm=RMSNorm()),
        readout=LanguageHead(tied=random.random() < 0.5),
    )
    model = build(config, seed=random.randrange(1 << 30)).eval()
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    times = random.choice([1.0, 4.0, 12.0]) if scale is None else scale
    with torch.no_grad():
        for module in model.modules():
            for name in ("sink", "head_scale"):
                learned = getattr(module, name, None)
                if isinstance(learned, nn.Parameter):
                    learned.normal_(generator=generator)
        for parameter in model.parameters():
            parameter.mul_(times)
    return model


def _attention(random: Random, width: int, heads: int, size: int, causal: bool) -> AttentionConfig:
    positions: list[AttentionPosition] = [NoPosition(), Rotary(), Alibi(), Shaw(reach=2)]
    positions.append(T5Buckets(buckets=8, shared=False))
    back = random.randint(0, 5)
    masks: list[Mask] = [Causal(), Window(back), Prefix(random.randint(1, 4))]
    if not causal:
        masks = [Full(), Window(back, random.randint(0, 3)), Blocks(random.randint(1, 5))]
        masks.append(Window(1, 1) | GlobalTokens((0, -1)))
    gates = (Gate(at="output", heads=random.choice(["shared", "own"])),)
    return AttentionConfig(
        width=width,
        heads=heads,
        kv_heads=random.choice([each for each in (1, 2, 4) if heads % each == 0]),
        head_size=size,
        mask=random.choice(masks),
        position=random.choice(positions),
        gates=gates if random.random() < 0.2 else (),
        sink="learned" if random.random() < 0.2 else "none",
    )


ATTACKS = [every_statistic, order_of_texts, odd_texts, labels]
# A case takes ten times as long as the others.
SLOW = [labels]
