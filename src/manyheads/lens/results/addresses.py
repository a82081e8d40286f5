"""The addresses and names of heads, and the attentions and mixers of a model in order."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention
from manyheads.errors import InputError, short_repr
from manyheads.mixers.mixer import Mixer
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.model_interface import ModelInterface
from manyheads.models.stack import Stack
from manyheads.parts import masks, norms
from manyheads.taps import HEAD_NAME, Head, Sublayer

HEAD_FORM = "write L5H1, L5 for all heads of a layer, or decoder L2H0 cross"


@dataclass(frozen=True, slots=True, repr=False)
class Address:
    """A head with its stack and sublayer; the text omits the self-attention of the only stack.

    >>> Address(Head(5, 1)), str(Address(Head(2, 0), "decoder", Sublayer.CROSS))
    (L5H1, 'decoder L2H0 cross')
    >>> Address.parse("decoder L2H0 cross").stack
    'decoder'
    """

    head: Head
    stack: str = "main"
    sublayer: Sublayer = Sublayer.ATTENTION

    @classmethod
    def parse(cls, text: str) -> "Address":
        stack, layer, head, sublayer = parse_head_name(text)
        if head is None:
            raise _not_an_address(text)
        return cls(Head(layer, head), stack or "main", sublayer or Sublayer.ATTENTION)

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

    __repr__ = __str__


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


HeadName = Head | Address | str
# What every function takes that takes heads; see `find_heads`.
Heads = HeadName | Iterable[HeadName]


def parse_head_name(text: str) -> tuple[str | None, int, int | None, Sublayer | None]:
    """The stack, layer, head and sublayer of a name; None for what it leaves out.

    >>> parse_head_name("decoder L2H0 cross")
    ('decoder', 2, 0, <Sublayer.CROSS: 'cross'>)
    >>> parse_head_name("L3")
    (None, 3, None, None)
    """
    match = HEAD_NAME.fullmatch(text.strip())
    if match is None:
        raise _not_an_address(text)
    stack, layer, head, sublayer = match.groups()
    return (
        stack,
        int(layer),
        None if head is None else int(head),
        None if sublayer is None else Sublayer(sublayer.lower()),
    )


def head_names(heads: Heads) -> tuple[HeadName, ...]:
    """The names of heads one by one.

    >>> head_names("L0H1, decoder L2H0 cross")
    ('L0H1', 'decoder L2H0 cross')
    """
    if not isinstance(heads, Iterable):
        heads = (heads,)
    elif isinstance(heads, str):
        return tuple(text for part in heads.split(",") if (text := part.strip())) or (heads,)
    names: list[HeadName] = []
    for name in heads:
        if not isinstance(name, Head | Address | str):
            raise _not_an_address(name)
        names += head_names(name) if isinstance(name, str) else [name]
    return tuple(names)


def find_heads(
    model: ModelInterface, heads: Heads, stack: str | None = None, sublayer: Sublayer | None = None
) -> tuple[Address, ...]:
    """The addresses of the named heads of a model, each once.

    A head is a `Head`, an `Address`, or its name as it is printed: "L5H1", "decoder L2H0 cross".
    "L5" means all heads of a layer, "all" those of the model; a text may have several names with
    commas between them. Where a name leaves out the stack and sublayer, they are those passed, by
    default the self-attention of the stack that is read out: the decoder of an encoder-decoder.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50)
    >>> [str(address) for address in find_heads(model, ["L1", Head(0, 1)])]
    ['L1H0', 'L1H1', 'L0H1']
    """
    addresses = [address for block in blocks_of(model) for address in block.addresses]
    return pick_heads(addresses, heads, stack or model.readout_stack, sublayer)


def pick_heads(
    addresses: Collection[Address],
    heads: Heads,
    stack: str | None = None,
    sublayer: Sublayer | None = None,
) -> tuple[Address, ...]:
    """The named heads among these addresses; see `find_heads`.

    Without `stack` and `sublayer` the defaults are the decoder, or the first stack of all, and its
    self-attention, or its first sublayer of all.
    """
    blocks: dict[tuple[str, Sublayer, int], list[Address]] = {}
    for address in addresses:
        block = (address.stack, address.sublayer, address.head.layer)
        blocks.setdefault(block, []).append(address)
    stacks = list(dict.fromkeys(name for name, _, _ in blocks)) or ["main"]
    stack = stack or ("decoder" if "decoder" in stacks else stacks[0])
    if sublayer is None:
        sublayers = [part for name, part, _ in blocks if name == stack]
        attention = Sublayer.ATTENTION in sublayers or not sublayers
        sublayer = Sublayer.ATTENTION if attention else sublayers[0]
    matches: dict[Address, None] = {}
    for name in head_names(heads):
        if name == "all":
            matches |= dict.fromkeys(addresses)
            continue
        in_stack, layer, head, part = _parts(name)
        if in_stack is None:
            in_stack, part = stack, part or sublayer
        in_stack = next(
            (spelling for spelling in stacks if spelling.lower() == in_stack.lower()), in_stack
        )
        block = (in_stack, part or Sublayer.ATTENTION, layer)
        chosen = [own for own in blocks.get(block, ()) if head in (None, own.head.head)]
        if not chosen:
            raise _no_such_head(addresses, block, head)
        matches |= dict.fromkeys(chosen)
    return tuple(matches)


def pick_head(addresses: Collection[Address], head: HeadName) -> Address:
    """The one head of this name among these addresses."""
    if isinstance(head, Address) and head in addresses:
        return head
    matches = pick_heads(addresses, head)
    if len(matches) > 1:
        raise InputError(
            f"{short_repr(head)} names {len(matches)} heads", f"choose one, such as {matches[0]}"
        )
    return matches[0]


def _parts(name: HeadName) -> tuple[str | None, int, int | None, Sublayer | None]:
    if isinstance(name, str):
        return parse_head_name(name)
    if isinstance(name, Head):
        return None, name.layer, name.head, None
    return name.stack, name.head.layer, name.head.head, name.sublayer


def _not_an_address(value: object) -> InputError:
    return InputError(f"{short_repr(value)} is not the address of a head", HEAD_FORM)


def _no_such_head(
    addresses: Collection[Address], block: tuple[str, Sublayer, int], head: int | None
) -> InputError:
    """Offers the heads of the layer, else of the stack and sublayer, else all."""
    stack, sublayer, layer = block
    name = str(Address(Head(layer, 0 if head is None else head), stack, sublayer))
    name = name.replace(f"L{layer}H0", f"L{layer}") if head is None else name
    same = [address for address in addresses if (address.stack, address.sublayer) == block[:2]]
    near = [address for address in same if address.head.layer == layer] or same or addresses
    groups: dict[tuple[str, Sublayer], list[Address]] = {}
    for address in near:
        groups.setdefault((address.stack, address.sublayer), []).append(address)
    ranges = [f"{group[0]} to {group[-1]}" for group in groups.values()]
    remedy = f"use {' or '.join(ranges)}" if ranges else "choose a model with heads"
    return InputError(f"there is no head {name}", remedy)


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
    return weight * scale.weight[:, None] if isinstance(scale, norms.ChannelScale) else weight


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


def mask_in(layer: LayerConfig, sublayer: Sublayer) -> masks.Mask:
    """Which tokens the heads of a sublayer may see."""
    branch = layer.cross if sublayer is Sublayer.CROSS else layer.attention
    if branch is not None:
        return branch.inner.mask
    assert layer.mixer is not None, "there are heads"
    return masks.Causal() if layer.mixer.inner.causal else masks.Full()
