"""The time of one more token after texts of several lengths, with a cache and without."""

import math
import time
from collections.abc import Callable, Mapping
from statistics import linear_regression

import torch

from manyheads.cache import StaticCache
from manyheads.decoding.steps.cached import CachedSteps, Steps
from manyheads.decoding.steps.cuda_graph import cannot, cuda_graph_steps
from manyheads.models import Decoder
from manyheads.ragged import Ragged
from studies.small_models import VOCABULARY
from studies.training import even_lengths, logits_of

WARM_UP, ROUNDS, STEPS = 3, 4, 4


def cached_ms(
    model: Decoder, batch: int, length: int, *, recorded: bool = True
) -> tuple[float, float]:
    """Milliseconds of a token for a batch of texts, and bytes of the cache per text and token.

    On CUDA a step is recorded if it can be. A mixer's state is one for all tokens of a text.
    """
    device = next(model.parameters()).device
    tokens = length + WARM_UP + ROUNDS * STEPS
    steps: Steps
    if recorded and cannot(model, device) is None:
        steps = cuda_graph_steps(model, batch, tokens)
        size = steps.capacity
    else:
        steps = CachedSteps(model, StaticCache(size=tokens))
        size = tokens
    ids = torch.randint(VOCABULARY, (batch * length,), device=device)
    steps.start(Ragged(ids, even_lengths(batch, length, device)))
    last = ids[:batch]

    def several(count: int) -> None:
        for _ in range(count):
            steps.next(last)

    several(WARM_UP)
    milliseconds = min(_ms(device, lambda: several(STEPS)) for _ in range(ROUNDS)) / STEPS
    return milliseconds, steps.cache.nbytes / batch / size


@torch.no_grad()
def uncached_ms(model: Decoder, batch: int, length: int) -> float:
    """Milliseconds of a token if all texts are read again for it."""
    device = next(model.parameters()).device
    ids = torch.randint(VOCABULARY, (batch, length), device=device)
    return min(_ms(device, lambda: logits_of(model, ids)) for _ in range(ROUNDS))


def _ms(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def growth_exponent(times: Mapping[str, float]) -> float:
    """The p of times that grow as length ** p, by least squares of logarithms.

    >>> round(growth_exponent({"16": 1.0, "64": 4.0, "256": 16.0}), 3)
    1.0
    """
    if len(times) < 2:
        return math.nan
    lengths = [math.log(float(length)) for length in times]
    return linear_regression(lengths, [math.log(value) for value in times.values()]).slope
