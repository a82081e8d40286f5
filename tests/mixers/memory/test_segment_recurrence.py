"""Segment recurrence against its definition, one segment after another."""

import pytest
import torch
from torch import Tensor

from manyheads import Ragged
from manyheads.cache import StateCache, StateSlot
from manyheads.errors import InputError
from manyheads.mixers.memory.segment_recurrence import SegmentRecurrence, SegmentRecurrenceLayer
from manyheads.parts.positions import Sinusoidal

WIDTH, HEADS = 8, 2


def made(segment: int, memory: int) -> SegmentRecurrenceLayer:
    torch.manual_seed(0)
    layer = SegmentRecurrenceLayer(
        SegmentRecurrence(width=WIDTH, heads=HEADS, segment=segment, memory=memory)
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def by_segment(layer: SegmentRecurrenceLayer, text: Tensor) -> Tensor:
    """Each segment reads the tokens of its memory, cut off from the gradient, and itself."""
    config, outputs = layer.config, []
    for start in range(0, len(text), config.segment):
        own = text[start : start + config.segment]
        memory = text[max(start - config.memory, 0) : start].detach()
        key, value = layer.project(torch.cat([memory, own])).chunk(2, dim=-1)
        query = layer.project_query(own)
        at = torch.arange(len(own))[:, None] + len(memory) - torch.arange(len(key))
        far = Sinusoidal().vectors(at.clamp(min=0).flatten(), WIDTH)
        distance = layer.project_distance(far).unflatten(0, at.shape)
        size, heads = config.size, []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            content = (query[:, part] + layer.content_bias[head]) @ key[:, part].T
            apart = (query[:, part] + layer.distance_bias[head])[:, None] * distance[..., part]
            scores = (content + apart.sum(-1)) * size**-0.5
            weights = scores.masked_fill(at < 0, -torch.inf).softmax(-1)
            heads.append(weights @ value[:, part])
        outputs.append(layer.output(torch.cat(heads, dim=1)))
    return torch.cat(outputs)


@pytest.mark.parametrize(("segment", "memory"), [(4, 6), (5, 5), (3, 0), (1, 2)])
def test_outputs_and_gradients_are_those_of_segments(segment: int, memory: int) -> None:
    layer, texts = made(segment, memory), [torch.randn(14, WIDTH), torch.randn(4, WIDTH)]
    gradients = []
    for run in ("ragged", "by segment"):
        inputs = [text.clone().requires_grad_() for text in texts]
        if run == "ragged":
            result = layer(Ragged.from_list(inputs)).values
        else:
            result = torch.cat([by_segment(layer, text) for text in inputs])
        layer.zero_grad()
        result.sin().sum().backward()
        gradients.append(
            [result.detach(), *(text.grad for text in inputs)]
            + [parameter.grad.clone() for parameter in layer.parameters() if memory or segment > 1]
        )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_pieces_of_any_length_continue_the_segments() -> None:
    layer = made(4, 6)
    texts = [torch.randn(23, WIDTH), torch.randn(23, WIDTH)]
    slot = StateSlot(StateCache())
    pieces = [
        layer(Ragged.from_list([text[start:stop] for text in texts]), cache=slot).to_list()
        for start, stop in ((0, 3), (3, 3), (3, 12), (12, 13), (13, 23))
    ]
    for text, result in zip(texts, zip(*pieces, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(result), by_segment(layer, text), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="a cache of this model"):
        made(4, 5)(Ragged.from_list(texts), cache=slot)
