"""Optimizers: their configs, and the update rules of AdamW, StableAdamW and Muon."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.annotations import Above, AtLeast, Between, NonNegativeFloat, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError
from manyheads.train.optim import param_groups
from manyheads.train.optim.param_groups import ParameterInfo, RateFactor, checked_parameters

Group = dict[str, Any]
State = dict[str, Any]
FUSED_ON = {"cpu", "cuda", "mps", "xpu"}


Lr = Annotated[float, Above(0, "use a value such as 1e-3")]
Beta = Annotated[float, Between(0, 1, "[)", "use a value such as 0.9")]
Eps = Annotated[float, AtLeast(0, "use a value such as 1e-8")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """`lr` is the peak learning rate, which a schedule multiplies.

    `decay` does not apply to norms, biases, scales and, unless `decay_embeddings`, embeddings;
    `rates` are factors for parts of the model.
    """

    lr: Lr
    betas: tuple[Beta, Beta]
    eps: Eps
    decay: NonNegativeFloat
    decay_embeddings: bool = False
    rates: tuple[RateFactor, ...] = ()

    def param_groups(
        self, weights: Iterable[ParameterInfo], rates: Sequence[RateFactor], *, rule: str
    ) -> list[Group]:
        """Groups whose parameters are updated by a `rule` with these settings."""
        return param_groups.build_param_groups(
            weights,
            lr=self.lr,
            decay=self.decay,
            decay_embeddings=self.decay_embeddings,
            rates=rates,
            rule=rule,
            betas=self.betas,
            eps=self.eps,
        )


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW(AdamSettings):
    """Adam with decoupled weight decay (arXiv 1711.05101), fused where possible."""

    lr: Lr = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Eps = 1e-8
    decay: NonNegativeFloat = 0.1

    def build(self, model: nn.Module) -> Optimizer:
        weights = checked_parameters(model, self.rates)
        fused = {info.parameter.device.type for info in weights} <= FUSED_ON
        groups = self.param_groups(weights, self.rates, rule="adamw")
        return ScaledAdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=fused)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class StableAdamW(AdamSettings):
    """AdamW whose steps are clipped by their root mean square (arXiv 2304.13013).

    Each matrix is clipped separately, queries, keys and values too. The defaults are those of
    ModernBERT-base.
    """

    lr: Lr = 8e-4
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Eps = 1e-6
    decay: NonNegativeFloat = 1e-5

    def build(self, model: nn.Module) -> Optimizer:
        weights = checked_parameters(model, self.rates)
        return RuleOptimizer(self.param_groups(weights, self.rates, rule="stable"))


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Orthogonalised momentum for the matrices, AdamW for the `rest`.

    The rest is embeddings, readout, norms and biases. Queries, keys, values and both halves of a
    gated feed-forward are separate matrices. `size="adamw"` scales steps to the size of AdamW's, so
    that its learning rates fit (arXiv 2502.16982); "original" needs a rate of about 0.02.
    """

    lr: Lr = 0.02
    momentum: Beta = 0.95
    nesterov: bool = True
    decay: NonNegativeFloat = 0.1
    rounds: PositiveInt = 5
    size: Literal["original", "adamw"] = "original"
    precision: Literal["half", "single"] = "half"
    rest: AdamW = AdamW()
    rates: tuple[RateFactor, ...] = ()

    def __post_init__(self) -> None:
        if self.rest.rates:
            raise ConfigError("rest.rates cannot be used with Muon", "set rates of Muon itself")

    def build(self, model: nn.Module) -> Optimizer:
        weights = checked_parameters(model, self.rates)
        matrices = param_groups.build_param_groups(
            [info for info in weights if info.matrix],
            lr=self.lr,
            decay=self.decay,
            rates=self.rates,
            rule="muon",
            momentum=self.momentum,
            nesterov=self.nesterov,
            rounds=self.rounds,
            size=self.size,
            precision=self.precision,
        )
        others = [info for info in weights if not info.matrix]
        return RuleOptimizer(matrices + self.rest.param_groups(others, self.rates, rule="adamw"))


OptimizerConfig = AdamW | StableAdamW | Muon


# arXiv 2502.16982: singular values are close to one after five rounds.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class ScaledAdamW(torch.optim.AdamW):
    """torch's AdamW, with the step scaled separately for each part of a fused matrix.

    AdamW is invariant to the scale of a gradient, so the change of the parameter is scaled.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        scaled = [
            (group, parameter, _local(parameter).clone())
            for group in self.param_groups
            if any(factor != 1 for _, factor in group["parts"])
            for parameter in group["params"]
        ]
        loss = super().step(closure)
        for group, parameter, before in scaled:
            after = _local(parameter)
            after.copy_(torch.lerp(before, after, _factors(group, parameter)))
        return loss


class RuleOptimizer(Optimizer):
    """An optimizer whose parameter groups have different update rules."""

    def __init__(self, groups: Iterable[Group]) -> None:
        super().__init__(groups, {"rule": "adamw"})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    RULES[group["rule"]](parameter, self.state[parameter], group)
        return loss


def _adam(parameter: Tensor, state: State, group: Group, *, clips: bool = False) -> None:
    """AdamW (arXiv 1711.05101), with moments that are stored bias-corrected.

    StableAdamW `clips`: a step is divided by the RMS of gradient over second moment, if above 1.
    """
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter)
        state["exp_avg_sq"] = torch.zeros_like(parameter)
    state["step"] += 1
    step = int(state["step"])
    first, second = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in group["betas"])
    assert parameter.grad is not None
    gradient = _local(parameter.grad)
    mean, square = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
    mean.lerp_(gradient, 1 - first)
    square.lerp_(gradient.square(), 1 - second)
    rate = group["lr"] * _factors(group, parameter)
    if clips:
        surprise = gradient.square().div_(square.clamp(min=group["eps"] ** 2))
        rate = rate / _part_means(surprise, group, parameter).sqrt().clamp(min=1)
    own = _local(parameter)
    if group["weight_decay"]:
        own.mul_(1 - rate * group["weight_decay"])
    own.sub_(rate * mean / square.sqrt().add_(group["eps"]))


def _muon(parameter: Tensor, state: State, group: Group) -> None:
    """Orthogonalised momentum (arXiv 2502.16982)."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(parameter)
    gradient = parameter.grad
    assert gradient is not None
    momentum: Tensor = state["momentum_buffer"]
    momentum.lerp_(gradient, 1 - group["momentum"])
    direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
    whole = direction.full_tensor() if hasattr(direction, "full_tensor") else direction
    step = torch.empty_like(whole)
    for span, factor in param_groups.spans(group):
        index = (*[slice(None)] * group["axis"], span)
        part = whole[index]
        rows, columns = part.shape[-2:]
        # "adamw" matches the size of AdamW's steps.
        scale = math.sqrt(max(1, rows / columns))
        if group["size"] == "adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        update = orthogonalise(part, group["rounds"], group["precision"])
        step[index] = update * (factor * scale)
    if group["weight_decay"]:
        decay = group["lr"] * group["weight_decay"]
        _local(parameter).mul_(1 - decay * _factors(group, parameter))
    _local(parameter).sub_(group["lr"] * _own_shard(step, parameter))


RULES: dict[str, Callable[[Tensor, State, Group], None]] = {
    "adamw": _adam,
    "stable": partial(_adam, clips=True),
    "muon": _muon,
}


def orthogonalise(
    matrix: Float[Tensor, "*batch rows columns"], rounds: int, precision: str
) -> Float[Tensor, "*batch rows columns"]:
    """The nearest matrix whose singular values are all about one, by Newton-Schulz."""
    x = matrix.to(torch.bfloat16 if precision == "half" else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def _along(values: Tensor, axis: int, dims: int) -> Tensor:
    return values.view([-1 if index == axis else 1 for index in range(dims)])


def _factors(group: Group, parameter: Tensor) -> Tensor | float:
    """The factor of each part, broadcast along this process's shard of the parameter."""
    factors = tuple(factor for _, factor in group["parts"])
    if set(factors) <= {1.0}:
        return 1.0
    rows = param_groups.part_of_row(group, parameter)
    spread = _on(factors, parameter.device)[rows].to(parameter.dtype)
    return _along(spread, group["axis"], parameter.dim())


def _part_means(x: Tensor, group: Group, parameter: Any) -> Tensor:
    """The mean of each part over all processes, broadcast like `_factors`."""
    axis, count = group["axis"], max(len(group["parts"]), 1)
    if parameter.dim() == 0:
        return x
    owner = param_groups.part_of_row(group, parameter)
    sums = x.new_zeros(count).index_add(0, owner, x.movedim(axis, 0).reshape(len(owner), -1).sum(1))
    if hasattr(parameter, "device_mesh"):
        for index, placement in enumerate(parameter.placements):
            if placement.is_shard():
                torch.distributed.all_reduce(sums, group=parameter.device_mesh.get_group(index))
    sizes = tuple(size for size, _ in group["parts"]) or (parameter.shape[axis],)
    per_row = parameter.numel() / parameter.shape[axis]
    return _along((sums / (_on(sizes, x.device) * per_row))[owner], axis, parameter.dim())


@lru_cache(maxsize=256)
def _on(numbers: tuple[float | int, ...], device: torch.device) -> Tensor:
    """A tensor cached on the device, since creating it would wait for the device."""
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _local(tensor: Tensor) -> Tensor:
    """The shard of this process."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _own_shard(whole: Tensor, parameter: Any) -> Tensor:
    if not hasattr(parameter, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    everywhere = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=parameter.placements).to_local()
