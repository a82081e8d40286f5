"""How large a model is and how fast it reads, for a comparison before and after."""

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manyheads.attention import Attention
from manyheads.lens.given import Given, read, run, shares
from manyheads.models.build import Model
from manyheads.models.resting import resting

__all__ = ["Weight", "compare_weights", "weigh"]

ROUNDS = 7
# Tokens that are timed together.
ROOM = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """Parameters in all and in attention, bytes of them, heads, and tokens read a second."""

    parameters: int
    attention: int
    bytes: int
    heads: int
    tokens_a_second: float

    def told(self) -> dict[str, Any]:
        return asdict(self)


def weigh(model: Model, texts: Any) -> Weight:
    """A model's size, and its speed on the texts."""
    return compare_weights((model,), texts)[0]


def compare_weights(models: tuple[Model, ...], texts: Any) -> list[Weight]:
    """Several models, timed by turns so that whatever else the machine does meets all alike."""
    given = read(models[0], texts)
    sizes = given.sizes(models[0])
    first = next(shares(sizes, ROOM))
    batch, tokens = given.select(first), sum(sizes[text] for text in first)
    seconds: list[list[float]] = [[] for _ in models]
    for _ in range(ROUNDS + 1):
        for found, model in zip(seconds, models, strict=True):
            found.append(_timed(model, batch))
    # The first round warms up.
    rates = [tokens / statistics.median(found[1:]) for found in seconds]
    return [_weight(model, rate) for model, rate in zip(models, rates, strict=True)]


def _timed(model: Model, batch: Given) -> float:
    on_cuda = next(model.parameters()).is_cuda
    with resting(model), torch.inference_mode():
        if on_cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        run(model, batch)
        if on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started


def _weight(model: Model, rate: float) -> Weight:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    return Weight(
        parameters=sum(each.numel() for each in model.parameters()),
        attention=sum(each.numel() for one in attentions for each in one.parameters()),
        bytes=sum(each.numel() * each.element_size() for each in model.parameters()),
        heads=sum(each.config.heads for each in attentions),
        tokens_a_second=rate,
    )
