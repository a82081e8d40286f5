"""Keys mixed with the key before them (arXiv 2209.11895): one layer can then do induction."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from manyheads import build
from manyheads.attention import Attention, PositionEncoding
from manyheads.models import Decoder
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext
from studies.small_models import language_model


class SmearedAttention(Attention):
    """Attention whose keys are s k_j + (1 - s) k_(j-1), with a learned s = sigmoid(a) per head."""

    def __init__(self, attention: Attention) -> None:
        super().__init__(attention.config)
        self.load_state_dict(attention.state_dict())
        self.smear = nn.Parameter(torch.zeros(self.config.key_heads))
        # Keys are rotated here, after they are mixed, and not by the kernel.
        self.plain = False

    def _key_value(
        self,
        parts: dict[str, Tensor],
        source: Ragged,
        encoding: PositionEncoding,
        context: WatchContext | None,
    ) -> tuple[Tensor, Tensor]:
        key = self._heads(parts["key"])
        share = self.smear.sigmoid().to(key.dtype)[:, None]
        mixed = share * key + (1 - share) * previous(key, source.lengths)
        return super()._key_value(parts | {"key": mixed.flatten(1)}, source, encoding, context)


def previous(x: Tensor, lengths: Lengths) -> Tensor:
    """For each token the value of the one before it; the first of a text has its own."""
    first = (lengths.positions == 0).view(-1, *[1] * (x.dim() - 1))
    return torch.where(first, x, x.roll(1, 0))


def attention_only(
    *, width: int, layers: int, heads: int, vocabulary: int, smeared: bool, seed: int
) -> Decoder:
    """A decoder without feed-forwards."""
    config = language_model(
        width=width, layers=1, heads=heads, vocabulary=vocabulary, seed=seed
    ).config
    layer = replace(config.stack.layers[0], feedforward=None)
    model = build(replace(config, stack=replace(config.stack, layers=(layer,) * layers)), seed=seed)
    assert isinstance(model, Decoder)
    if smeared:
        parts: Any = model.stack.layers
        for part in parts:
            part.attention = SmearedAttention(part.attention)
    return model
