"""Generation for benchmarks: what prompts share is read once, and some heads may be off."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.bridge.wrapped_steps import WrappedSteps
from manyheads.cache import DynamicCache
from manyheads.decoding.generation import SamplingLoop
from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.request import GenerationRequest
from manyheads.decoding.steps.cached import CachedSteps, Steps
from manyheads.models import build, decoder
from manyheads.models.encoder import last_tokens
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher
from manyheads.tasks.benchmarks.continuation_scores import branches_cache
from manyheads.tasks.benchmarks.prefix_tree import MIN_SHARED, common_length

# Texts that are generated side by side.
CPU_TEXTS, CUDA_TEXTS = 16, 128


def generate_ids(
    model: build.Model,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    watch: Watcher | None = None,
    progress: bool = True,
) -> list[tuple[int, ...]]:
    """The new tokens of every prompt; a watcher sees each step and may replace activations."""
    order = sorted(range(len(prompts)), key=lambda index: tuple(prompts[index]))
    together = CUDA_TEXTS if next(model.parameters()).is_cuda else CPU_TEXTS
    results: dict[int, tuple[int, ...]] = {}
    bar = Progress("generating", total=len(order), unit="texts", enabled=progress)
    with bar, build.eval_mode(model):
        for start in range(0, len(order), together):
            batch = order[start : start + together]
            request = _Request(model, [list(prompts[index]) for index in batch], config, watch)
            loop = SamplingLoop(request, decode_each_step=bool(request.stop_strings))
            for _ in loop.run():
                pass
            ids = (generation.ids for generation in loop.generations())
            results |= dict(zip(batch, ids, strict=True))
            bar.advance(len(batch))
    return [results[index] for index in range(len(prompts))]


class _Request(GenerationRequest):
    """A request whose steps a watcher sees, and whose prompts may begin alike."""

    def __init__(
        self, model: build.Model, prompts: Any, config: GenerationConfig, watch: Watcher | None
    ) -> None:
        super().__init__(model, prompts, config)
        self.watch = watch

    def steps(self) -> Steps:
        if isinstance(self.model, WrappedModel):
            return WrappedSteps(self.model, self.start_id, self.watch)
        on_cpu = self.device.type == "cpu"
        if branches_cache(self.model) and (on_cpu or self.watch is not None):
            assert isinstance(self.model, decoder.Decoder)
            return PromptSteps(self.model, self.watch)
        return super().steps()


class PromptSteps(CachedSteps):
    """Steps of texts whose common beginning is read once."""

    def __init__(self, model: decoder.Decoder, watch: Watcher | None = None) -> None:
        super().__init__(model, DynamicCache())
        self.watch = watch

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        ids = [tuple(prompt) for prompt in (row.tolist() for row in prompts.to_list())]
        # The last token of each is read with those that differ.
        common = min(common_length(ids[0], text) for text in ids)
        common = min(common, min(map(len, ids)) - 1)
        if len(ids) == 1 or common < MIN_SHARED:
            return self._logits(prompts)
        self._logits(Ragged.from_list([prompts.of(0)[:common]]))
        self.cache = self.cache.branch([0] * len(ids))
        return self._logits(Ragged.from_list([row[common:] for row in prompts.to_list()]))

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " b"]) -> Float[Tensor, "b v"]:
        if self.watch is None:
            return super().next(ids)
        return self._logits(Ragged(ids, Lengths.of([1] * len(ids), ids.device)))

    def _logits(self, ids: Ragged) -> Float[Tensor, "b v"]:
        """The logits of the token after each text."""
        model = self.model
        assert isinstance(model, decoder.Decoder)
        if self.watch is None:
            return model.next_logits(ids, self.cache)
        plan = self.cache.plan(ids.lengths)
        x = model.embedding.embed(ids, plan.positions)
        at = plan.positions
        hidden, _ = model.stack(x, positions=at, cache=self.cache, plan=plan, watch=self.watch)
        self.cache.finish(plan)
        assert model.readout is not None, "callers check that there is a language head"
        return model.readout.logits(last_tokens(hidden).values, model.table)
