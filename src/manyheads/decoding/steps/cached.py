"""Steps through the model with a cache of any kind, on any device."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.cache import DynamicCache, StaticCache
from manyheads.decoding.steps.cpu_step import CpuStep, cannot
from manyheads.models import decoder, seq2seq
from manyheads.ragged import Lengths, Ragged


@runtime_checkable
class Steps(Protocol):
    """A batch of sequences during generation; call `start` once, then `next` for every token."""

    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        """Process the prompts and return the logits of the token after each.

        The following step may overwrite them.
        """

    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        """Append a token to each sequence and return the logits of the next one.

        The following step may overwrite them.
        """

    def select(self, sequences: list[int]) -> None:
        """Continue with these sequences, in this order; a beam may occur more than once."""


class CachedSteps:
    """Steps through the model itself, with its keys and values in a cache of any kind.

    A decoder continues the prompts. A `Seq2Seq` encodes them, and its decoder starts from
    `start_id`.
    """

    def __init__(
        self,
        model: decoder.Decoder | seq2seq.Seq2Seq,
        cache: DynamicCache | StaticCache,
        start_id: int | None = None,
    ) -> None:
        self.model = model
        self.cache_config = cache
        self.cache = model.new_cache(cache)
        self.start_id = start_id
        self._switch = model.stack.rotation_switch if isinstance(model, decoder.Decoder) else None
        # The ids of all texts, if the keys in the cache must be computed again at some length.
        self._texts: list[list[int]] = []
        self._ones = Lengths.of([])
        self._cpu_step: CpuStep | None = None
        if isinstance(model, decoder.Decoder) and cannot(model) is None:
            self._cpu_step = CpuStep(model)

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        if self._switch is not None:
            self._texts = [text.tolist() for text in prompts.to_list()]
        if isinstance(self.model, decoder.Decoder):
            return self.model.next_logits(prompts, self.cache)
        assert self.start_id is not None
        first = torch.full((len(prompts),), self.start_id, device=prompts.device)
        return self.model.next_logits(prompts, self._one_each(first), self.cache)

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        if self._switch is not None:
            for text, token in zip(self._texts, ids.tolist(), strict=True):
                text.append(token)
            if any(len(text) == self._switch + 1 for text in self._texts):
                # One is now too long for its rotation: all start again, with a new cache.
                assert isinstance(self.model, decoder.Decoder)
                self.cache = self.model.new_cache(self.cache_config)
                texts = [torch.tensor(text, device=ids.device) for text in self._texts]
                return self.model.next_logits(Ragged.from_list(texts), self.cache)
        new = self._one_each(ids)
        if self._cpu_step is not None and self._cpu_step.fits(self.cache):
            return self._cpu_step.next(new, self.cache)
        if isinstance(self.model, decoder.Decoder):
            return self.model.next_logits(new, self.cache)
        return self.model.next_logits(None, new, self.cache)

    @torch.inference_mode()
    def select(self, sequences: list[int]) -> None:
        self.cache.select(sequences)
        if self._texts:
            self._texts = [list(self._texts[sequence]) for sequence in sequences]

    def _one_each(self, ids: Int[Tensor, " b"]) -> Ragged:
        # Reused until a sequence leaves the batch.
        if len(self._ones) != ids.shape[0]:
            self._ones = Lengths.of([1] * ids.shape[0], ids.device)
        return Ragged(ids, self._ones)


def async_tolist(values: Tensor) -> Callable[[], list[Any]]:
    """Start the copy of a tensor to the host; the returned function waits for it and reads it."""
    if not values.is_cuda:
        return values.tolist
    copy, done = values.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record()

    def read() -> list[Any]:
        done.synchronize()
        return copy.tolist()

    return read
