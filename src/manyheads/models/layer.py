"""One layer: attention, optional cross-attention and a feed-forward, each a residual branch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import check_fields
from manyheads.attention import Attention, AttentionConfig, PositionEncoding
from manyheads.cache import CacheSlot, KeyValues, StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.batch_segments import mix
from manyheads.mixers.build import MixerConfig, make_mixer
from manyheads.mixers.mixer import Mixer
from manyheads.parts import norms
from manyheads.parts.convolution import Convolution, ConvolutionLayer
from manyheads.parts.experts import Experts, MixtureOfExperts, RouterLosses
from manyheads.parts.feedforward import MLP, Constant, ConstantLayer, FeedForward, GeGLU, SwiGLU
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer, Tap, WatchContext, observe

FeedForwardConfig = MLP | GeGLU | SwiGLU | Experts
Inner = TypeVar("Inner", bound=AttentionConfig | Constant | FeedForwardConfig | MixerConfig)


@dataclass(frozen=True, slots=True)
class Branch(Generic[Inner]):
    """A sublayer with its norm and dropout on the residual stream."""

    inner: Inner
    norm: norms.Placement = norms.PreNorm()
    dropout: float = 0.0


AnyBranch = (
    Branch[AttentionConfig] | Branch[Constant] | Branch[FeedForwardConfig] | Branch[MixerConfig]
)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """The sublayers of a layer, in this order; None for one that it does not have.

    Self-attention is an `attention` or a `mixer`. `attention_rest` and `cross_rest` replace an
    attention whose heads are all pruned. `branches` has what the layer consists of. With
    `residual="parallel"` the feed-forward reads what the attention reads, not what it wrote, and
    both are added: x + attention(norm(x)) + feedforward(norm(x)), as in GPT-NeoX. With
    `residual="parallel_one_norm"` both norms are one, as in GPT-J. With `residual="reversible"`
    there are two residual streams: attention reads the second and writes to the first, the
    feed-forward the other way round, as in the Reformer (arXiv 2001.04451). A `convolution` of what
    enters the layer is added to what the feed-forward leaves.
    """

    attention: Branch[AttentionConfig] | None
    cross: Branch[AttentionConfig] | None = None
    feedforward: Branch[FeedForwardConfig] | None
    attention_rest: Branch[Constant] | None = None
    cross_rest: Branch[Constant] | None = None
    mixer: Branch[MixerConfig] | None = None
    residual: Literal["serial", "parallel", "parallel_one_norm", "reversible"] = "serial"
    convolution: Convolution | None = None

    def __post_init__(self) -> None:
        unsupported = f'residual="{self.residual}" is not supported with'
        if self.residual != "serial" and Sublayer.CROSS in self.branches:
            raise ConfigError(f"{unsupported} cross-attention", 'use residual="serial"')
        placements = [branch.norm for branch in self.branches.values()]
        if self.residual != "serial" and any(isinstance(at, norms.PostNorm) for at in placements):
            problem = f"{unsupported} PostNorm, which norms the sum of both branches"
            raise ConfigError(problem, "use PreNorm")
        if self.one_norm and len(set(placements)) > 1:
            raise ConfigError(
                f"{unsupported} two norms", 'give both branches the same, or use "parallel"'
            )
        if self.convolution is not None and (
            self.feedforward is None or self.residual == "reversible"
        ):
            raise ConfigError(
                "a convolution is added after a feed-forward, to one residual stream",
                "use convolution=None",
            )
        if len(self.widths) > 1:
            problem = f"the sublayers have widths {sorted(self.widths)}"
            raise ConfigError(problem, "give all of them the same width")
        if self.attention is not None and self.attention.inner.keys_from == "memory":
            raise ConfigError('attention has keys_from="memory"', "make it the cross branch")
        if self.cross is not None and self.cross.inner.keys_from == "itself":
            raise ConfigError('cross has keys_from="itself"', 'use keys_from="memory"')
        for names in ("attention", "mixer", "attention_rest"), ("cross", "cross_rest"):
            present = [name for name in names if getattr(self, name) is not None]
            if len(present) > 1:
                raise ConfigError(f"both {present[0]} and {present[1]} are set", "keep one")

    @property
    def branches(self) -> dict[Sublayer, AnyBranch]:
        """The branch of each sublayer that the layer has, whatever is inside."""
        slots = {
            Sublayer.ATTENTION: self.attention or self.mixer or self.attention_rest,
            Sublayer.CROSS: self.cross or self.cross_rest,
            Sublayer.FEEDFORWARD: self.feedforward,
        }
        return {sublayer: branch for sublayer, branch in slots.items() if branch is not None}

    @property
    def one_norm(self) -> bool:
        """Whether the feed-forward reads by the norm of the attention."""
        attends = self.attention is not None or self.mixer is not None
        return self.residual == "parallel_one_norm" and attends and self.feedforward is not None

    @property
    def widths(self) -> set[int]:
        convolved = set() if self.convolution is None else {self.convolution.width}
        return convolved | {branch.inner.width for branch in self.branches.values()}


class Residual(nn.Module):
    """The norms and the dropout around a sublayer."""

    def __init__(self, branch: AnyBranch, width: int) -> None:
        super().__init__()
        placement = branch.norm
        self.placement = placement
        only_after = isinstance(placement, norms.OutputNorm)
        self.norm = norms.make_norm(norms.NoNorm() if only_after else placement.norm, width)
        twice = isinstance(placement, norms.SandwichNorm | norms.OutputNorm)
        self.second_norm = norms.make_norm(placement.norm, width) if twice else None
        if isinstance(placement, norms.ScaledPreNorm):
            self.second_norm = norms.ChannelScale(width, placement.start)
        self.dropout = nn.Dropout(branch.dropout)

    def use_norm_of(self, branch: "Residual") -> None:
        """Norm by the weights of another branch, which alone are parameters."""
        del self.norm
        self.__dict__["norm"] = branch.norm

    def read(self, x: Float[Tensor, "*n c"]) -> Float[Tensor, "*n c"]:
        """The input of the sublayer."""
        return x if isinstance(self.placement, norms.PostNorm) else self.norm(x)

    def write(
        self,
        x: Ragged,
        written: Float[Tensor, "n c"],
        context: WatchContext | None,
        close: Callable[[Tensor], Tensor] | None = None,
    ) -> Float[Tensor, "n c"]:
        """The residual stream after the sublayer, and after what closes its layer."""
        if self.second_norm is not None:
            written = self.second_norm(written)
        written = observe(context, Tap.OUTPUT, written, x)
        summed = x.values + self.dropout(written)
        summed = self.norm(summed) if isinstance(self.placement, norms.PostNorm) else summed
        return observe(context, Tap.AFTER, summed if close is None else close(summed), x)


class Layer(nn.Module):
    """A layer with the sublayers of its config."""

    def __init__(self, config: LayerConfig, width: int, *, owns_table: bool = True) -> None:
        super().__init__()
        self.config = config
        self.attention: Attention | None = None
        self.cross: Attention | None = None
        self.feedforward: MixtureOfExperts | FeedForward | None = None
        self.mixer: Mixer | None = None
        self.attention_rest: ConstantLayer | None = None
        self.cross_rest: ConstantLayer | None = None
        if config.attention is not None:
            self.attention = Attention(config.attention.inner, owns_table=owns_table)
            self.attention_residual = Residual(config.attention, width)
        elif config.mixer is not None:
            self.mixer = make_mixer(config.mixer.inner)
            self.attention_residual = Residual(config.mixer, width)
        elif config.attention_rest is not None:
            self.attention_rest = ConstantLayer(config.attention_rest.inner)
            self.attention_residual = Residual(config.attention_rest, width)
        if config.cross is not None:
            self.cross = Attention(config.cross.inner)
            self.cross_residual = Residual(config.cross, width)
        elif config.cross_rest is not None:
            self.cross_rest = ConstantLayer(config.cross_rest.inner)
            self.cross_residual = Residual(config.cross_rest, width)
        if config.feedforward is not None:
            inner = config.feedforward.inner
            self.feedforward = (
                MixtureOfExperts(inner) if isinstance(inner, Experts) else FeedForward(inner)
            )
            self.feedforward_residual = Residual(config.feedforward, width)
            if config.one_norm:
                self.feedforward_residual.use_norm_of(self.attention_residual)
        self.convolution: ConvolutionLayer | None = None
        if config.convolution is not None:
            self.convolution = ConvolutionLayer(config.convolution)
        self.attends = Sublayer.ATTENTION in config.branches
        self.parallel = config.residual.startswith("parallel") and self.attends
        self.reversible = config.residual == "reversible"

    def forward(
        self,
        x: Ragged,
        *,
        encoding: PositionEncoding = None,
        memory: Ragged | KeyValues | None = None,
        cache: CacheSlot | StateSlot | None = None,
        context: WatchContext | None = None,
    ) -> tuple[Ragged, RouterLosses | None]:
        first = None
        if self.reversible:
            first, x = (x.with_values(half) for half in x.values.chunk(2, dim=-1))
        entered, added = x, None
        if self.attends:
            inside = _within(context, Sublayer.ATTENTION)
            entered, normed = _read(self.attention_residual, x, inside)
            if self.mixer is not None:
                assert not isinstance(cache, CacheSlot)
                written = mix(self.mixer, normed, cache=cache, context=inside).values
                if torch.is_grad_enabled():
                    added = self.mixer.added_losses(normed)
            elif self.attention is not None:
                assert not isinstance(cache, StateSlot)
                attended = self.attention(normed, encoding=encoding, cache=cache, context=inside)
                written = attended.values
            else:
                assert self.attention_rest is not None
                written = self.attention_rest(normed.values)
            onto = entered if first is None else first
            x = x.with_values(self.attention_residual.write(onto, written, inside))
        elif first is not None:
            x = first
        x, losses = self.finish(entered, x, memory, context)
        return x, losses if added is None else added.plus(losses)

    def finish(
        self,
        entered: Ragged,
        x: Ragged,
        memory: Ragged | KeyValues | None = None,
        context: WatchContext | None = None,
    ) -> tuple[Ragged, RouterLosses | None]:
        """The rest of `forward`, from the residual stream before and after self-attention.

        In a reversible layer these are the second stream and the first.
        """
        if self.cross is not None or self.cross_rest is not None:
            inside = _within(context, Sublayer.CROSS)
            x, normed = _read(self.cross_residual, x, inside)
            if self.cross is not None:
                written = self.cross(normed, memory=memory, context=inside).values
            else:
                assert self.cross_rest is not None
                written = self.cross_rest(normed.values)
            x = x.with_values(self.cross_residual.write(x, written, inside))
        losses = None
        if self.feedforward is not None:
            inside = _within(context, Sublayer.FEEDFORWARD)
            source = entered if self.parallel else x
            source, normed = _read(self.feedforward_residual, source, inside)
            x = x if self.parallel else source
            output = self.feedforward(normed.values, x, inside)
            output, losses = output if isinstance(output, tuple) else (output, None)
            onto = entered if self.reversible else x
            close = None if self.convolution is None else partial(self.convolution, entered)
            summed = x.with_values(self.feedforward_residual.write(onto, output, inside, close))
            x, entered = (x, summed) if self.reversible else (summed, entered)
        if self.reversible:
            x = x.with_values(torch.cat([x.values, entered.values], dim=-1))
        return x, losses


def _within(context: WatchContext | None, sublayer: Sublayer) -> WatchContext | None:
    return None if context is None else context.within(layer=context.layer, sublayer=sublayer)


def _read(residual: Residual, x: Ragged, context: WatchContext | None) -> tuple[Ragged, Ragged]:
    x = x.with_values(observe(context, Tap.BEFORE, x.values, x))
    return x, x.with_values(residual.read(observe(context, Tap.READ, x.values, x)))
