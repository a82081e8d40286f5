"""Attention whose weights are sigmoids of the scores and are not divided by their sum."""

from typing import Literal

import torch
from torch import Tensor

from manyheads.attention import Attention, PositionEncoding
from manyheads.cache import CacheSlot, KeyValues
from manyheads.models import Decoder
from manyheads.parts.positions.rotary import Rotation
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap, WatchContext
from studies.training import even_lengths

# The mean weight of a sink (arXiv 2410.10781).
SINK_ABOVE = 0.3


class SigmoidAttention(Attention):
    """Causal attention over texts of one length, with weights that need not sum to one.

    A watcher of the pattern sees the weights as they are.
    """

    def forward(
        self,
        x: Ragged,
        *,
        memory: Ragged | KeyValues | None = None,
        encoding: PositionEncoding | Literal["own"] = "own",
        cache: CacheSlot | None = None,
        context: WatchContext | None = None,
    ) -> Ragged:
        assert memory is None
        assert cache is None
        assert encoding != "own"
        assert x.lengths.uniform
        parts = self._parts(x.values)
        query = self._heads(parts["query"])
        query = encoding(query) if isinstance(encoding, Rotation) else query
        key, value = self._key_value(parts, x, encoding, None)
        texts = (x.lengths.count, x.lengths.longest)
        q, k, v = (part.unflatten(0, texts).transpose(1, 2) for part in (query, key, value))
        scores = self.config.score_scale * (q @ k.mT)
        weights = torch.sigmoid(scores).tril()
        if context is not None and context.wants(Tap.PATTERN):
            context.at(Tap.PATTERN, Patterns(tuple(weights.float())))
        output = (weights.to(v.dtype) @ v).transpose(1, 2).flatten(0, 1)
        return x.with_values(self.output(output.flatten(1)))


def without_softmax(model: Decoder) -> Decoder:
    """The same model with sigmoids in place of every softmax."""
    for layer in model.stack.layers:
        attention = layer.attention
        assert isinstance(attention, Attention)
        replaced = SigmoidAttention(attention.config)
        replaced.load_state_dict(attention.state_dict())
        layer.attention = replaced
    return model


@torch.no_grad()
def measure_sigmoid_sinks(model: Decoder, passages: Tensor, sink_length: int) -> dict[str, float]:
    """What `measure_sinks` measures, of weights that are divided by their sum."""
    whole, by_layer = _first_token(model, passages)
    short, _ = _first_token(model, passages[:, :sink_length])
    return {
        "first_token": float(whole.mean()),
        "sink_share": float((short.mean(-1) > SINK_ABOVE).float().mean()),
        "largest": max(by_layer),
        "mean_largest": sum(by_layer) / len(by_layer),
    }


def _first_token(model: Decoder, ids: Tensor) -> tuple[Tensor, list[float]]:
    """Its share by layer, text, head and query, and the largest activation of each layer."""
    layers = range(len(model.stack.layers))
    patterns = [Site(layer, Tap.PATTERN) for layer in layers]
    after = [Site(layer, Tap.AFTER, Sublayer.FEEDFORWARD) for layer in layers]
    record = Record([*patterns, *after])
    model.hidden(Ragged(ids.flatten(), even_lengths(*ids.shape, ids.device)), watch=record)
    shares, largest = [], []
    for one, other in zip(patterns, after, strict=True):
        pattern, stream = record[one], record[other]
        assert isinstance(pattern, Patterns)
        assert isinstance(stream, Ragged)
        weights = torch.stack(pattern.each)
        shares.append(weights[..., 0] / weights.sum(-1))
        largest.append(float(stream.values.abs().max()))
    return torch.stack(shares), largest
