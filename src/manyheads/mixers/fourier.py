"""FNet (arXiv 2105.03824): the real part of a Fourier transform mixes the tokens of a text."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.mixers.mixer import Mixer, MixerSettings, refuse_cache
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Fourier(MixerSettings):
    """The real part of the discrete Fourier transform over the tokens and channels of each text.

    It has no weights and no heads, and every token sees the whole text.

    >>> from manyheads.mixers.build import make_mixer
    >>> mixed = make_mixer(Fourier(width=2))(Ragged.from_list([torch.ones(3, 2)]))
    >>> mixed.values.tolist()
    [[6.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """

    causal = False


class FourierLayer(Mixer):
    """The transform of each text; those of the same length are transformed together."""

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        del context  # it has no heads
        refuse_cache(cache)
        if not x.lengths.total:
            # A transform of no tokens is not defined.
            return x
        same = defaultdict(list)
        for index, length in enumerate(x.lengths.each):
            same[length].append(index)
        same.pop(0, None)
        pieces: dict[int, Tensor] = {}
        texts = x.to_list()
        for sequences in same.values():
            # There is no transform of bfloat16.
            group = torch.stack([texts[index] for index in sequences]).float()
            pieces |= dict(zip(sequences, _real_transform(group), strict=True))
        mixed = torch.cat([pieces[index] for index in sorted(pieces)])
        return x.with_values(mixed.to(x.values.dtype))


def _real_transform(x: Float[Tensor, "b t c"]) -> Float[Tensor, "b t c"]:
    """Of half of the channels; the others mirror them, since the input is real."""
    half = torch.fft.fft(torch.fft.rfft(x, dim=2), dim=1).real
    mirrored = half[:, :, 1 : (x.shape[2] + 1) // 2].flip(2)
    # Counted backwards, the first token stays the first.
    mirrored = torch.cat([mirrored[:, :1], mirrored[:, 1:].flip(1)], dim=1)
    return torch.cat([half, mirrored], dim=2)
