"""Optimiser configs, which build a torch optimiser for a model."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from manyheads.errors import ConfigError
from manyheads.train.optim.param_groups import (
    RateFactor,
    build_param_groups,
    check_patterns,
    describe_parameters,
)
from manyheads.train.optim.update_rules import RuleOptimizer, ScaledAdamW

FUSED_ON = {"cpu", "cuda", "mps", "xpu"}


def _check(rate: float, decay: float, betas: tuple[float, ...], eps: float = 0.0) -> None:
    for name, number in (("rate", rate), ("decay", decay), ("eps", eps)):
        if not math.isfinite(number):
            raise ConfigError(f"{name} must be finite, got {number}", "use a finite number")
    if eps < 0:
        raise ConfigError(f"eps must be at least 0, got {eps:g}", "use a value such as 1e-8")
    if rate <= 0:
        raise ConfigError(f"rate must be above 0, got {rate:g}", "use a value such as 1e-3")
    if decay < 0:
        raise ConfigError(f"decay must be at least 0, got {decay:g}", "use 0 or more")
    for beta in betas:
        if not 0 <= beta < 1:
            raise ConfigError(
                f"betas and momentum must be in [0, 1), got {beta:g}", "use a value such as 0.9"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv 1711.05101), fused where possible.

    `rate` is the peak learning rate, which a schedule multiplies; `decay` does not apply to norms,
    biases, scales and, unless `decay_embeddings`, embeddings; `rates` are factors for parts of the
    model.
    """

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    decay: float = 0.1
    decay_embeddings: bool = False
    rates: tuple[RateFactor, ...] = ()

    def __post_init__(self) -> None:
        _check(self.rate, self.decay, self.betas, self.eps)

    def build(self, model: nn.Module) -> Optimizer:
        weights = describe_parameters(model)
        check_patterns(weights, self.rates)
        groups = build_param_groups(
            weights,
            rate=self.rate,
            decay=self.decay,
            decay_embeddings=self.decay_embeddings,
            rates=self.rates,
        )
        kinds = {each.parameter.device.type for each in weights}
        return ScaledAdamW(
            groups, lr=self.rate, betas=self.betas, eps=self.eps, fused=kinds <= FUSED_ON
        )

    def entries(self) -> dict[str, Any]:
        return {"rule": "adamw", "betas": self.betas, "eps": self.eps}


@dataclass(frozen=True, slots=True, kw_only=True)
class StableAdamW:
    """AdamW whose steps are clipped by their root mean square (arXiv 2304.13013).

    Each matrix is clipped separately, queries, keys and values too. The defaults are those of
    ModernBERT-base.
    """

    rate: float = 8e-4
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-6
    decay: float = 1e-5
    decay_embeddings: bool = False
    rates: tuple[RateFactor, ...] = ()

    def __post_init__(self) -> None:
        _check(self.rate, self.decay, self.betas, self.eps)

    def build(self, model: nn.Module) -> Optimizer:
        weights = describe_parameters(model)
        check_patterns(weights, self.rates)
        entries: dict[str, Any] = {"rule": "stable", "betas": self.betas, "eps": self.eps}
        return RuleOptimizer(
            build_param_groups(
                weights,
                rate=self.rate,
                decay=self.decay,
                decay_embeddings=self.decay_embeddings,
                rates=self.rates,
                **entries,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Orthogonalised momentum for the matrices, AdamW for the `rest`.

    The rest is embeddings, readout, norms and biases. Queries, keys, values and both halves of a
    gated feed-forward are separate matrices. `size="adamw"` scales steps to the size of AdamW's, so
    that its learning rates fit (arXiv 2502.16982); "original" needs a rate of about 0.02.
    """

    rate: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    decay: float = 0.1
    rounds: int = 5
    size: Literal["original", "adamw"] = "original"
    precision: Literal["half", "single"] = "half"
    rest: AdamW = AdamW()
    rates: tuple[RateFactor, ...] = ()

    def __post_init__(self) -> None:
        _check(self.rate, self.decay, (self.momentum,))
        if self.rounds < 1:
            raise ConfigError(
                f"rounds must be at least 1, got {self.rounds}", "use a value such as 5"
            )
        if self.rest.rates:
            raise ConfigError("rest.rates cannot be used with Muon", "set rates of Muon itself")

    def build(self, model: nn.Module) -> Optimizer:
        weights = describe_parameters(model)
        check_patterns(weights, self.rates)
        entries: dict[str, Any] = {
            "rule": "muon",
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "rounds": self.rounds,
            "size": self.size,
            "precision": self.precision,
        }
        matrices = [each for each in weights if each.matrix]
        others = [each for each in weights if not each.matrix]
        rest, rates = self.rest, self.rates
        return RuleOptimizer(
            build_param_groups(matrices, rate=self.rate, decay=self.decay, rates=rates, **entries)
            + build_param_groups(
                others,
                rate=rest.rate,
                decay=rest.decay,
                decay_embeddings=rest.decay_embeddings,
                rates=rates,
                **rest.entries(),
            )
        )


OptimiserConfig = AdamW | StableAdamW | Muon
