"""A model on one batch: its run is kept, and can be taken up again at any layer with changes."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import InputError
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.results.addresses import Address, Block
from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap

Change = Callable[[Tensor], Tensor]
StackName = Literal["main", "encoder", "decoder"]


@dataclass(frozen=True, slots=True)
class Part:
    """The attention that heads are counted in: of which stack, and to itself or to memory."""

    model: Model
    stack_name: StackName = "main"
    sublayer: Sublayer = Sublayer.ATTENTION

    @property
    def stack(self) -> Stack:
        if isinstance(self.model, Seq2Seq):
            return self.model.encoder if self.stack_name == "encoder" else self.model.decoder
        return self.model.stack

    def config(self, layer: int) -> AttentionConfig | None:
        config = self.stack.config.layers[layer]
        branch = config.cross if self.sublayer is Sublayer.CROSS else config.attention
        return None if branch is None else branch.inner

    def attention(self, layer: int) -> Attention:
        """The module of a layer that is known to have heads."""
        module = cast(Layer, self.stack.layers[layer])
        found = module.cross if self.sublayer is Sublayer.CROSS else module.attention
        assert found is not None
        return found

    def site(self, layer: int, tap: Tap) -> Site:
        return Site(layer, tap, self.sublayer, self.stack_name)

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have heads."""
        every = range(len(self.stack.config.layers))
        return tuple(layer for layer in every if self.config(layer) is not None)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            Block(layer, self.attention(layer).config.heads, self.stack_name, self.sublayer)
            for layer in self.layers
        )

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(address.head for block in self.blocks for address in block.addresses)


def part_of(
    model: Model,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
) -> Part:
    """The named attention; a `Seq2Seq` is looked at in its decoder unless said otherwise."""
    two = isinstance(model, Seq2Seq)
    name: StackName = stack or ("decoder" if two else "main")
    if two == (name == "main"):
        there = '"encoder" or "decoder"' if two else '"main"'
        raise InputError(f"this {type(model).__name__} has no stack {name!r}", f"use {there}")
    if sublayer is Sublayer.FEEDFORWARD:
        raise InputError("a feed-forward has no heads", "use Sublayer.ATTENTION or Sublayer.CROSS")
    part = Part(model, name, sublayer)
    if not part.heads:
        raise InputError(f"the {name} stack has no {sublayer.value} heads", "look elsewhere")
    return part


def find_heads(
    part: Part, heads: Literal["all"] | Iterable[Head | Address | str]
) -> tuple[Head, ...]:
    """The named heads, each of which the part has."""
    if heads == "all":
        return part.heads
    known = set(part.heads)
    found = tuple(_head_of(part, each) for each in heads)
    for head in found:
        if head not in known:
            last = part.heads[-1]
            raise InputError(f"the model has no head {head}", f"use L0H0 to {last}, as it has them")
    return found


def _head_of(part: Part, given: Head | Address | str) -> Head:
    if isinstance(given, str):
        return Head.parse(given)
    if isinstance(given, Head):
        return given
    if (given.stack, given.sublayer) != (part.stack_name, part.sublayer):
        raise InputError(
            f"{given} is none of the {part.sublayer.value} heads of the {part.stack_name} stack",
            f"name that one: stack={given.stack!r}, sublayer={given.sublayer}",
        )
    return given.head


def entry(stack: Stack, layer: int) -> Site:
    """Where the residual stream that enters a layer is seen."""
    config = stack.config.layers[layer]
    if config.attention is not None or config.attention_rest is not None:
        first = Sublayer.ATTENTION
    elif config.cross is not None or config.cross_rest is not None:
        first = Sublayer.CROSS
    else:
        first = Sublayer.FEEDFORWARD
    return Site(layer, Tap.BEFORE, first, stack.name)


def repeated(x: Ragged, copies: int) -> Ragged:
    """The batch `copies` times over, side by side."""
    if copies == 1:
        return x
    values = x.values.repeat(copies, *[1] * (x.values.dim() - 1))
    return Ragged(values, Lengths.of(x.lengths.each * copies, x.device))


class Edits:
    """A watcher that puts other values in the place of some, and keeps what it was asked to.

    A site that is both changed and kept is kept as changed.
    """

    def __init__(self, changes: Mapping[Site, Change], keep: Iterable[Site] = ()) -> None:
        self.changes = dict(changes)
        self.kept = Record(keep)

    def wants(self, site: Site) -> bool:
        return site in self.changes or self.kept.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        if site in self.changes:
            assert isinstance(value, Ragged), "nobody here changes a pattern"
            value = value.map(self.changes[site])
        if self.kept.wants(site):
            self.kept.see(site, value)
        return value

    def __getitem__(self, site: Site) -> Ragged:
        kept = self.kept[site]
        assert isinstance(kept, Ragged), "patterns are not kept here"
        return kept


class Trunk:
    """One run of a model over one batch, with what is needed to go on from any layer of a part."""

    def __init__(
        self,
        part: Part,
        given: Given,
        *,
        layers: Sequence[int] | None = None,
        keep: Iterable[Site] = (),
        changes: Mapping[Site, Change] | None = None,
    ) -> None:
        self.part, self.given = part, given
        layers = part.layers if layers is None else layers
        sites = [*keep, Site(-1, Tap.FINAL, stack=part.stack_name)]
        sites += [part.site(layer, Tap.HEAD_OUTPUT) for layer in layers if part.config(layer)]
        sites += [entry(part.stack, layer) for layer in layers]
        if part.stack_name == "decoder":
            sites.append(Site(-1, Tap.FINAL, stack="encoder"))
        if part.stack_name == "encoder":
            sites.append(Site(-1, Tap.EMBEDDINGS, stack="decoder"))
            sites.append(Site(-1, Tap.FINAL, stack="decoder"))
        self._seen = Edits({} if changes is None else changes, sites)
        climb(part.model, given, self._seen)

    def __getitem__(self, site: Site) -> Ragged:
        return self._seen[site]

    @property
    def hidden(self) -> Ragged:
        """What the readout gets."""
        name = "decoder" if self.part.stack_name == "encoder" else self.part.stack_name
        return self[Site(-1, Tap.FINAL, stack=name)]

    def head_outputs(self, layer: int) -> Ragged:
        return self[self.part.site(layer, Tap.HEAD_OUTPUT)]

    def resume(self, layer: int, watch: Edits | None = None, copies: int = 1) -> Ragged:
        """What the readout gets from copies of the batch that go on at `layer`, watched there."""
        stack = self.part.stack
        return self.go_on(repeated(self[entry(stack, layer)], copies), layer, watch, copies)

    def speak(self, layer: int, watch: Edits, copies: int = 1) -> Ragged:
        """What `resume` gives where nothing but head outputs is changed: `layer` mixes no more.

        Its heads say in each copy what they have said, but for what the watcher changes.
        """
        attention, site = self.part.attention(layer), self.part.site(layer, Tap.HEAD_OUTPUT)
        # A gate after the output reads what the attention read, and of attention to memory the one
        # before it would have to be known: these run as a whole.
        gated = any(gate.at == "final" for gate in attention.config.gates)
        if gated or self.part.sublayer is Sublayer.CROSS:
            return self.resume(layer, watch, copies)
        spoken = watch.see(site, repeated(self.head_outputs(layer), copies))
        assert isinstance(spoken, Ragged), "heads say no patterns"
        x = repeated(self[entry(self.part.stack, layer)], copies)
        module = cast(Layer, self.part.stack.layers[layer])
        written = attention.output(spoken.values.flatten(1))
        x = x.with_values(module.attention_residual.leave(x, written, None))
        x, _ = module.finish(x, self._memory(copies))
        return self.go_on(x, layer + 1, watch, copies)

    def go_on(self, x: Ragged, layer: int, watch: Edits | None = None, copies: int = 1) -> Ragged:
        """The same from a residual stream of one's own."""
        final, _ = self.part.stack.resume(x, layer, memory=self._memory(copies), watch=watch)
        if self.part.stack_name != "encoder":
            return final
        model = cast(Seq2Seq, self.part.model)
        begin = repeated(self[Site(-1, Tap.EMBEDDINGS, stack="decoder")], copies)
        return model.decoder.resume(begin, 0, memory=final, watch=watch)[0]

    def _memory(self, copies: int) -> Ragged | None:
        """What cross-attention reads."""
        if self.part.stack_name != "decoder":
            return None
        return repeated(self[Site(-1, Tap.FINAL, stack="encoder")], copies)
