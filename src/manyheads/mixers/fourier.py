"""FNet (arXiv 2105.03824): the real part of a Fourier transform mixes the tokens of a text."""

from collections import defaultdict
from dataclasses import dataclass

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import check_int
from manyheads.mixers.mixer import Mixer, refuse_cache
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Look


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Fourier:
    """The real part of the discrete Fourier transform over the tokens and channels of each text.

    It has no weights and no heads, and every token sees the whole text.

    >>> from manyheads.mixers.build import make_mixer
    >>> mixed = make_mixer(Fourier(width=2))(Ragged.from_list([torch.ones(3, 2)]))
    >>> mixed.values.tolist()
    [[6.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """

    width: int

    def __post_init__(self) -> None:
        check_int("width", self.width, minimum=1)

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return False


class FourierLayer(Mixer):
    """The transform; it has no weights."""

    def __init__(self, config: Fourier) -> None:
        super().__init__()
        self.config = config

    def forward(
        self,
        x: Ragged,
        *,
        cache: StateSlot | None = None,
        look: Look | None = None,  # noqa: ARG002, it has no heads to look at
    ) -> Ragged:
        refuse_cache(cache)
        # There is no transform of bfloat16.
        across = torch.fft.fft(x.values.float(), dim=-1)
        return x.with_values(_real_transform(across, x.lengths).to(x.values.dtype))


def _real_transform(x: Complex[Tensor, "n c"], lengths: Lengths) -> Float[Tensor, "n c"]:
    """Over the tokens of each text; texts of the same length are transformed together."""
    same = defaultdict(list)
    slices = list(lengths.slices())
    for index, length in enumerate(lengths.each):
        same[length].append(index)
    # A transform of no tokens is not defined.
    same.pop(0, None)
    pieces: dict[int, Tensor] = {}
    for sequences in same.values():
        group = torch.stack([x[slices[index]] for index in sequences])
        pieces |= dict(zip(sequences, torch.fft.fft(group, dim=1).real, strict=True))
    return torch.cat([x[:0].real, *(pieces[index] for index in sorted(pieces))])
