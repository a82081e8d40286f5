"""MLP-Mixer (arXiv 2105.01601): a feed-forward across the tokens of a text of fixed length."""

from dataclasses import dataclass

from torch import nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import InputError
from manyheads.mixers.mixer import Mixer, MixerSettings, refuse_cache
from manyheads.parts.feedforward import ACTIVATIONS, Activation
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class MlpMixer(MixerSettings):
    """`hidden` sums over the `length` tokens of a text, an activation, and sums of those.

    Every channel has the same weights, and every text must have this length. The feed-forward
    across channels is that of the layer.
    """

    causal = False

    length: PositiveInt
    hidden: PositiveInt
    activation: Activation = "gelu"
    bias: bool = True


class MlpMixerLayer(Mixer):
    """The feed-forward across tokens."""

    def __init__(self, config: MlpMixer) -> None:
        super().__init__(config)
        self.expand = nn.Linear(config.length, config.hidden, bias=config.bias)
        self.contract = nn.Linear(config.hidden, config.length, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        del context  # it has no heads
        refuse_cache(cache)
        length = self.config.length
        wrong = next((tokens for tokens in x.lengths.each if tokens != length), None)
        if wrong is not None:
            raise InputError(
                f"a text has {wrong} tokens, and this MLP-Mixer has weights for {length}",
                f"give texts of exactly {length} tokens, or use a mixer without a fixed length",
            )
        channels = x.values.unflatten(0, (len(x), length)).mT
        hidden = ACTIVATIONS[self.config.activation](self.expand(channels))
        return x.with_values(self.contract(hidden).mT.flatten(0, 1))
