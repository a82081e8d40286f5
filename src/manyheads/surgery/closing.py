"""Gates that learn which heads a model can do without, all weights being frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from manyheads.errors import ConfigError
from manyheads.lens.addresses import Address
from manyheads.lens.given import Targets, read
from manyheads.models.build import Model
from manyheads.surgery.keeping import whole
from manyheads.surgery.rebuilding import rebuild
from manyheads.surgery.tuning import objective_for, tune
from manyheads.taps import Head
from manyheads.train.optimisers import AdamW
from manyheads.train.regularisers import GATES, HeadGates, L0Gates, Regularised
from manyheads.train.schedules import Stable

__all__ = ["Closing", "close_gates"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How gates are trained: each open one costs `weight` of the loss a target."""

    weight: float = 0.01
    steps: int = 300
    rate: float = 0.1
    batch_tokens: int = 2048
    start: float = 0.9

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rate <= 0:
            raise ConfigError(
                f"steps={self.steps} at rate={self.rate:g} close nothing", "use numbers above 0"
            )


def close_gates(
    model: Model,
    texts: Any,
    how: Closing,
    *,
    targets: Targets | None,
    seed: int,
    shown: bool,
) -> Mapping[Address, float]:
    """How open each head's hard concrete gate is after training (arXiv 1905.09418): a logit.

    The gates of all heads of the model are trained together, on a copy.
    """
    copy = rebuild(model, whole(model))
    copy.requires_grad_(False)
    given = read(copy, texts)
    gated = Regularised(
        objective=objective_for(copy, given, targets),
        regularisers=(L0Gates(weight=how.weight, start=how.start),),
    )
    gated.attach(copy)
    gates = getattr(copy, GATES)
    assert isinstance(gates, HeadGates)
    tune(
        copy,
        given,
        gated,
        optimiser=AdamW(rate=how.rate, decay=0.0),
        schedule=Stable(),
        steps=how.steps,
        room=how.batch_tokens,
        seed=seed,
        shown=shown,
        label="closing gates",
    )
    found: dict[Address, float] = {}
    for (site, heads, _), openness in zip(gates.sites, gates.openness, strict=True):
        logits = openness.detach().double().cpu()
        assert torch.isfinite(logits).all(), "an unsound step is never followed"
        found |= {
            Address(Head(site.layer, head), site.stack, site.sublayer): float(logits[head])
            for head in range(heads)
        }
    return found
