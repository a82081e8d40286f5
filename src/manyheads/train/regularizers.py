"""Regularizers on attention heads: diversity, L1 on head scales, L0 by hard concrete gates."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import Between, NonNegativeFloat
from manyheads.argument_checks import check_fields
from manyheads.attention import Attention
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap, Watcher
from manyheads.train.objectives.objective import Loss, Objective, PreparedBatch, chain_watchers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# A sigmoid is stretched from 0..1 to LOW..HIGH, then clamped to 0..1.
LOW, HIGH, TEMPERATURE = -0.1, 1.1, 0.33
SHIFT = TEMPERATURE * math.log(-LOW / HIGH)


class GatedSite(NamedTuple):
    """A site with gated parts, their number, and their device."""

    site: Site
    parts: int
    device: torch.device


class HardConcrete(nn.Module, ABC):
    """A watcher with a hard concrete gate for every part, which scales the part's output.

    In training gates are sampled in each forward pass; in evaluation they are deterministic.
    `start` is the initial probability that a gate is open.
    """

    def __init__(self, sites: Sequence[GatedSite], start: float) -> None:
        super().__init__()
        # So that a gate is open with probability `start`.
        value = math.log(start / (1 - start)) + SHIFT
        self.sites = tuple(sites)
        self.gate_probability = nn.ParameterList(
            torch.full((parts,), value, device=device) for _, parts, device in self.sites
        )
        self._index = {gated.site: index for index, gated in enumerate(self.sites)}

    def wants(self, site: Site) -> bool:
        return site in self._index

    @abstractmethod
    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        """The value with its parts scaled by their gates."""

    def values(self, site: Site) -> Float[Tensor, " k"]:
        """The gates of one site, 0 to 1."""
        gate_probability = self.gate_probability[self._index[site]]
        if not self.training:
            return settled(gate_probability)
        # 0 and 1 are left out, since their logits are infinite.
        chance = torch.rand_like(gate_probability).clamp(1e-6, 1 - 1e-6)
        return settled((chance.logit() + gate_probability) / TEMPERATURE)

    def expected_open(self) -> Float[Tensor, ""]:
        return torch.cat([torch.sigmoid(logits - SHIFT) for logits in self.gate_probability]).sum()

    def settled(self) -> Mapping[Site, Float[Tensor, " k"]]:
        """All gates in evaluation; a part with a gate of zero can be removed."""
        gates = [settled(gate_probability.detach()) for gate_probability in self.gate_probability]
        return {gated.site: gate for gated, gate in zip(self.sites, gates, strict=True)}


class HeadGates(HardConcrete):
    """A gate on the output of every attention head (arXiv 1905.09418); mixers have none."""

    def __init__(self, model: nn.Module, start: float = 0.9) -> None:
        sites = []
        for stack in (module for module in model.modules() if isinstance(module, Stack)):
            for index, layer in enumerate(stack.layers):
                for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS):
                    attention = getattr(layer, sublayer.value)
                    if attention is not None:
                        site = Site(index, Tap.HEAD_OUTPUT, sublayer, stack.name)
                        device = attention.project.weight.device
                        sites.append(GatedSite(site, attention.config.heads, device))
        if not sites:
            raise ConfigError(
                "the model has no attention heads to gate",
                "use a model with attention in some layers, or another regularizer",
            )
        super().__init__(sites, start)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        gate = self.values(site)
        return value.with_values(value.values * gate.to(value.values.dtype)[:, None])


def settled(gate_probability: Float[Tensor, " k"]) -> Float[Tensor, " k"]:
    """Gates in evaluation, 0 to 1."""
    return ((HIGH - LOW) * torch.sigmoid(gate_probability) + LOW).clamp(0, 1)


GATES = "head_gates"


@dataclass(frozen=True, slots=True)
class RegularizationTerm:
    """A regularizer in one forward pass: it may watch, and then computes its unweighted cost."""

    cost: Callable[[], Float[Tensor, ""]]
    watcher: Watcher | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularizer(ABC):
    """A term added to the loss, times `weight`."""

    weight: NonNegativeFloat

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of its part of the loss."""

    def attach(self, model: nn.Module) -> None:
        """Add trainable modules to the model, before the optimizer is built."""
        del model

    @abstractmethod
    def begin(self, model: nn.Module) -> RegularizationTerm:
        """The term for one forward pass."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDiversity(Regularizer):
    """A cost for heads of a layer with similar outputs or patterns (arXiv 1810.10183).

    For "outputs" the mean cosine, for "patterns" the mean overlap, over pairs of heads, tokens and
    layers. Patterns need the reference kernel and memory quadratic in the length.
    """

    of: Literal["outputs", "patterns"] = "outputs"

    @property
    def name(self) -> str:
        return f"head {self.of}"

    def begin(self, model: nn.Module) -> RegularizationTerm:
        del model
        heads = HeadSimilarity(Tap.HEAD_OUTPUT if self.of == "outputs" else Tap.PATTERN)
        return RegularizationTerm(heads.mean, heads)


class HeadSimilarity:
    """Watches heads and averages their similarity."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.similarities: list[Tensor] = []

    def wants(self, site: Site) -> bool:
        return site.tap is self.tap

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        del site
        if isinstance(value, Patterns):
            shares = [value.shares(sequence) for sequence in range(len(value))]
            similarities = [_pair_similarity(pattern.transpose(0, 1)) for pattern in shares]
        else:
            similarities = [_pair_similarity(F.normalize(value.values.float(), dim=-1))]
        tokens = torch.cat(similarities)
        if tokens.numel():
            self.similarities.append(tokens.mean())

    def mean(self) -> Float[Tensor, ""]:
        return torch.stack(self.similarities).mean() if self.similarities else torch.zeros(())


def _pair_similarity(x: Float[Tensor, "n h d"]) -> Float[Tensor, " n"]:
    """The mean dot product of two different heads, from the square of their sum."""
    heads = x.shape[1]
    pairs = x.sum(1).square().sum(-1) - x.square().sum((1, 2))
    return pairs / max(heads * (heads - 1), 1)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class L1Scales(Regularizer):
    """The L1 norm of all head scales, so that some go to zero."""

    @property
    def name(self) -> str:
        return "head scales"

    def attach(self, model: nn.Module) -> None:
        _scales(model)

    def begin(self, model: nn.Module) -> RegularizationTerm:
        scales = _scales(model)
        return RegularizationTerm(lambda: torch.cat([s.float().abs() for s in scales]).sum())


def _scales(model: nn.Module) -> Sequence[Tensor]:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    result = [attention.head_scale for attention in attentions if attention.head_scale is not None]
    if not result:
        raise ConfigError(
            "the model has no head scales",
            'set model.heads.scale="learned" in a run file, '
            'head_scale="learned" in AttentionConfig',
        )
    return result


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class L0Gates(Regularizer):
    """A learned gate per head; the cost is the expected number of open gates.

    Hard concrete gates on the heads' outputs (arXiv 1905.09418). `start` is the initial probability
    that a gate is open.
    """

    start: Annotated[float, Between(0, 1, "()", "use a probability such as 0.9")] = 0.9

    @property
    def name(self) -> str:
        return "open heads"

    def make(self, model: nn.Module) -> HardConcrete:
        """All gates, before training."""
        return HeadGates(model, self.start)

    def attach(self, model: nn.Module) -> None:
        if not hasattr(model, GATES):
            model.add_module(GATES, self.make(model))

    def begin(self, model: nn.Module) -> RegularizationTerm:
        gates = getattr(model, GATES, None)
        if not isinstance(gates, HardConcrete):
            raise ConfigError("the model has no gates for its heads", "call attach(model) first")
        return RegularizationTerm(gates.expected_open, gates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularized(Objective):
    """An objective with regularizers, each under its own name."""

    objective: Objective
    regularizers: tuple[Regularizer, ...]

    def __post_init__(self) -> None:
        names = [regularizer.name for regularizer in self.regularizers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"{names.count(name)} regularizers work on {name}", "keep one of them"
                )

    def attach(self, model: nn.Module) -> None:
        self.objective.attach(model)
        for regularizer in self.regularizers:
            regularizer.attach(model)

    def with_tokenizer(self, tokenizer: "Tokenizer | None") -> "Regularized":
        return replace(self, objective=self.objective.with_tokenizer(tokenizer))

    def check(self, model: nn.Module) -> None:
        self.objective.check(model)
        for regularizer in self.regularizers:
            regularizer.begin(model)

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        return self.objective.prepare(model, batch, generator)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        terms = [(regularizer, regularizer.begin(model)) for regularizer in self.regularizers]
        everyone = chain_watchers(*(term.watcher for _, term in terms), watch)
        loss = self.objective.score(model, prepared, watch=everyone)
        return loss.plus(
            {regularizer.name: regularizer.weight * term.cost() for regularizer, term in terms}
        )


def final_gates(model: nn.Module) -> Mapping[Site, Float[Tensor, " h"]]:
    """The final L0 gate of each head, from 0 (closed) to 1, by layer; empty without gates.

    The deterministic value of a hard concrete gate at test time (arXiv 1712.01312).

    >>> from manyheads.models.build import build
    >>> final_gates(build("gpt2", layers=1, width=32, heads=2, vocabulary=50))
    {}
    """
    gates = getattr(model, GATES, None)
    return gates.settled() if isinstance(gates, HeadGates) else {}


def fold_gates(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model without L0 gates that computes the same.

    A gate scales the output of a head, so it is multiplied into the columns of the output
    projection that read that head. `weights` are not changed.
    """
    tensors = {name: tensor for name, tensor in weights.items() if not name.startswith(f"{GATES}.")}
    gates = getattr(model, GATES, None)
    if not isinstance(gates, HeadGates):
        return tensors
    stacks = {
        module.name: name for name, module in model.named_modules() if isinstance(module, Stack)
    }
    for index, (site, heads, _) in enumerate(gates.sites):
        name = f"{stacks[site.stack]}.layers.{site.layer}.{site.sublayer.value}.output.weight"
        gate = settled(weights[f"{GATES}.gate_probability.{index}"])
        columns = torch.repeat_interleave(gate, tensors[name].shape[1] // heads)
        tensors[name] = tensors[name] * columns.to(tensors[name])
    return tensors
