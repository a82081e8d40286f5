"""The addresses of heads, and the attentions and mixers of a model in order."""

import re
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.errors import InputError
from manyheads.mixers.mixer import Mixer
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.model_interface import ModelInterface
from manyheads.models.stack import Stack
from manyheads.parts.masks import Causal, Full, Mask
from manyheads.parts.norms import ChannelScale
from manyheads.taps import Head, Sublayer


@dataclass(frozen=True, slots=True)
class Address:
    """A head with its stack and sublayer; the text omits the self-attention of the only stack.

    >>> str(Address(Head(5, 1))), str(Address(Head(2, 0), "decoder", Sublayer.CROSS))
    ('L5H1', 'decoder L2H0 cross')
    >>> Address.parse("decoder L2H0 cross").stack
    'decoder'
    """

    head: Head
    stack: str = "main"
    sublayer: Sublayer = Sublayer.ATTENTION

    @classmethod
    def parse(cls, text: str) -> "Address":
        match = re.fullmatch(r"(?:(\S+) )?(L\d+H\d+)(?: (attention|cross))?", text.strip())
        if match is None:
            raise InputError(
                f"{text!r} is not the address of a head", "write L5H1 or decoder L2H0 cross"
            )
        stack, head, sublayer = match.groups()
        return cls(Head.parse(head), stack or "main", Sublayer(sublayer or "attention"))

    def record(self) -> dict[str, Any]:
        """The columns that identify a head in a table."""
        return {
            "stack": self.stack,
            "sublayer": self.sublayer.value,
            "layer": self.head.layer,
            "head": self.head.head,
        }

    def __str__(self) -> str:
        stack = [] if self.stack == "main" else [self.stack]
        sublayer = [] if self.sublayer is Sublayer.ATTENTION else [self.sublayer.value]
        return " ".join([*stack, str(self.head), *sublayer])


@dataclass(frozen=True, slots=True)
class Block:
    """One attention or mixer of a model, with the number of its heads."""

    layer: int
    heads: int
    stack: str = "main"
    sublayer: Sublayer = Sublayer.ATTENTION

    @property
    def addresses(self) -> tuple[Address, ...]:
        heads = (Head(self.layer, head) for head in range(self.heads))
        return tuple(Address(head, self.stack, self.sublayer) for head in heads)


def blocks_of(model: ModelInterface) -> tuple[Block, ...]:
    """Every attention of a model and every mixer with heads, from the first layer to the last."""
    return tuple(
        Block(index, heads, name, sublayer)
        for name, stack in model.stacks().items()
        for index, layer in enumerate(stack.config.layers)
        for sublayer in (Sublayer.ATTENTION, Sublayer.CROSS)
        if (heads := heads_in(layer, sublayer))
    )


def check_one_stream(stack: Stack) -> None:
    """Refuse reversible layers where what is written to one residual stream must reach the rest."""
    if getattr(stack.config, "reversible", False):
        raise InputError(
            "this model has two residual streams, and its readout reads both",
            "use statistics, ablation, patching or integrated gradients",
        )


def mixer_at(stack: Stack, layer: int) -> Mixer | None:
    """The mixer of a layer; those of wrapped models have none."""
    return getattr(stack.layers[layer], "mixer", None)


def heads_at(stack: Stack, layer: int, sublayer: Sublayer) -> Attention | Mixer:
    """The attention of a layer and sublayer, or the mixer with heads that stands in its place."""
    mixer = mixer_at(stack, layer) if 0 <= layer < len(stack.layers) else None
    if mixer is not None and sublayer is Sublayer.ATTENTION:
        return mixer
    return attention_at(stack, layer, sublayer)


def attention_at(stack: Stack, layer: int, sublayer: Sublayer) -> Attention:
    """The attention module of a layer and sublayer; a mixer is none."""
    if not 0 <= layer < len(stack.layers):
        raise InputError(f"there is no layer {layer}", f"use 0 to {len(stack.layers) - 1}")
    module = stack.layers[layer]
    assert isinstance(module, Layer)
    attention = module.cross if sublayer is Sublayer.CROSS else module.attention
    if attention is None:
        mixer = None if sublayer is Sublayer.CROSS else module.config.mixer
        instead = "" if mixer is None else f" but a mixer, {type(mixer.inner).__name__}"
        raise InputError(f"layer {layer} has no {sublayer.value}{instead}", "choose another layer")
    return attention


def output_weight(stack: Stack, layer: int, sublayer: Sublayer) -> Float[Tensor, "c hd"]:
    """The projection of the heads' outputs, with the scale of its branch if it has one."""
    weight = heads_at(stack, layer, sublayer).output.weight
    residual = getattr(stack.layers[layer], f"{sublayer.value}_residual", None)
    scale = getattr(residual, "second_norm", None)
    return weight * scale.weight[:, None] if isinstance(scale, ChannelScale) else weight


def heads_in(layer: LayerConfig, sublayer: Sublayer) -> int:
    """The heads of an attention or of a mixer in its place; 0 where there is none or it has none.

    >>> from manyheads.mixers import LinearAttention
    >>> from manyheads.models.layer import Branch
    >>> mixer = Branch(LinearAttention(width=8, heads=2))
    >>> heads_in(LayerConfig(attention=None, mixer=mixer, feedforward=None), Sublayer.ATTENTION)
    2
    """
    if sublayer is Sublayer.CROSS:
        return 0 if layer.cross is None else layer.cross.inner.heads
    branch = layer.attention or layer.mixer
    return 0 if branch is None else getattr(branch.inner, "heads", 0)


def mask_in(layer: LayerConfig, sublayer: Sublayer) -> Mask:
    """Which tokens the heads of a sublayer may see."""
    branch = layer.cross if sublayer is Sublayer.CROSS else layer.attention
    if branch is not None:
        return branch.inner.mask
    assert layer.mixer is not None, "there are heads"
    return Causal() if layer.mixer.inner.causal else Full()
