"""One step of writing: token ids in, the scores of the next out, however they are computed."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.cache import DynamicCache, StaticCache
from manyheads.decoding.plain import Plain, cannot
from manyheads.models.decoder import Decoder
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ragged import Lengths, Ragged

__all__ = ["Cached", "Steps", "on_its_way"]


@runtime_checkable
class Steps(Protocol):
    """A batch of texts in the middle of being written; `start` comes first and once."""

    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        """Read the prompts; the scores of the token after each."""
        ...

    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        """Add a token to each text; the scores of the one after it.

        The scores may be overwritten by the next step.
        """
        ...

    def select(self, sequences: list[int]) -> None:
        """Go on with these texts, in this order; one may be named twice, as beams are."""
        ...


class Cached:
    """Steps through the model itself, with its keys and values in a cache of any kind.

    Prompts are what a decoder goes on from, and what a `Seq2Seq` reads; that one writes from
    `start_id`.
    """

    def __init__(
        self,
        model: Decoder | Seq2Seq,
        cache: DynamicCache | StaticCache,
        start_id: int | None = None,
    ) -> None:
        self.model = model
        self.cache = model.new_cache(cache)
        self.start_id = start_id
        self._ones = Lengths.of([])
        self._plain: Plain | None = None
        if isinstance(model, Decoder) and cannot(model) is None:
            self._plain = Plain(model)

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        if isinstance(self.model, Decoder):
            return self.model.next_logits(prompts, self.cache)
        assert self.start_id is not None
        first = torch.full((len(prompts),), self.start_id, device=prompts.device)
        return self.model.next_logits(prompts, self._one_each(first), self.cache)

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        new = self._one_each(ids)
        if self._plain is not None and self._plain.fits(self.cache):
            return self._plain.next(new, self.cache)
        if isinstance(self.model, Decoder):
            return self.model.next_logits(new, self.cache)
        return self.model.next_logits(None, new, self.cache)

    @torch.inference_mode()
    def select(self, sequences: list[int]) -> None:
        self.cache.select(sequences)

    def _one_each(self, ids: Int[Tensor, " b"]) -> Ragged:
        # Made once for as long as no text leaves.
        if len(self._ones) != ids.shape[0]:
            self._ones = Lengths.of([1] * ids.shape[0], ids.device)
        return Ragged(ids, self._ones)


def on_its_way(values: Tensor) -> Callable[[], list[Any]]:
    """Numbers sent to the host now and read when asked for, whatever the device does meanwhile."""
    if not values.is_cuda:
        return values.tolist
    copied, arrived = values.to("cpu", non_blocking=True), torch.cuda.Event()
    arrived.record()

    def read() -> list[Any]:
        arrived.synchronize()
        return copied.tolist()

    return read
