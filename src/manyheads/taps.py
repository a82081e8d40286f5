"""Where a model can be watched, and the watchers."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol, TypeVar, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import ConfigError, InputError, short_repr
from manyheads.formatting import kind_of
from manyheads.ragged import Ragged

# "L5H1", "L5" for a layer, or with the stack and the sublayer as printed: "decoder L2H0 cross".
# Longer numbers are no layers, and int() has its own error for thousands of digits.
HEAD_NAME = re.compile(
    r"(?:(\S+)\s+)?L(\d{1,9})(?:H(\d{1,9}))?(?:\s+(attention|cross))?", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, order=True)
class Head:
    """The address of an attention head, zero-based.

    >>> str(Head(layer=5, head=1)), Head.parse("L5H1")
    ('L5H1', Head(layer=5, head=1))
    """

    layer: int
    head: int

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    @classmethod
    def parse(cls, text: str) -> "Head":
        match = HEAD_NAME.fullmatch(text.strip())
        if match is None or match[1] or match[3] is None or match[4]:
            raise InputError(f"{short_repr(text)} is not the address of a head", "write it as L5H1")
        return cls(int(match[2]), int(match[3]))


class Sublayer(Enum):
    """The part of a layer that a site belongs to.

    A mixer stands where attention stood, and its sites are those of ATTENTION. MIXER only names
    what a mixer without heads adds to the logits.
    """

    ATTENTION = "attention"
    MIXER = "mixer"
    CROSS = "cross"
    FEEDFORWARD = "feedforward"


class Tap(Enum):
    """What can be seen at a site. n tokens, h heads, g key heads, d channels of a head, c width."""

    EMBEDDINGS = "embeddings"  # n c, what enters the first layer
    BEFORE = "before"  # n c, the residual stream before the sublayer
    READ = "read"  # n c, the same, as the sublayer reads it: a change leaves the stream alone
    QUERY = "query"  # n h d, as the kernel receives it: gated, normed, rotated
    KEY = "key"  # n g d, likewise
    VALUE = "value"  # n g d, likewise
    SCORES = "scores"  # h t s per sequence, scaled, with bias, -inf where masked
    PATTERN = "pattern"  # h t s per sequence; of a mixer, signed weights computed on demand
    MIXED = "mixed"  # n h d, the values as each head mixes them, before norms and gates
    HEAD_OUTPUT = "head_output"  # n h d, as the output projection receives it
    GATE_QUERY = "gate_query"  # the gates' values after their activation
    GATE_KEY = "gate_key"
    GATE_VALUE = "gate_value"
    GATE_OUTPUT = "gate_output"
    GATE_FINAL = "gate_final"
    INSIDE = "inside"  # n f, the feed-forward's hidden layer; of experts, the shared one's
    OUTPUT = "output"  # n c, what the sublayer adds to the residual stream
    AFTER = "after"  # n c, the residual stream after the sublayer
    FINAL = "final"  # n c, what the readout receives


_WHOLE_MODEL = {Tap.EMBEDDINGS, Tap.FINAL}
_ANY_SUBLAYER = {Tap.BEFORE, Tap.READ, Tap.OUTPUT, Tap.AFTER}


@dataclass(frozen=True, slots=True)
class Site:
    """A tap of one sublayer of one layer.

    An encoder-decoder has the stacks "encoder" and "decoder", other models only "main".
    `Tap.EMBEDDINGS` and `Tap.FINAL` belong to no layer: their layer is -1.

    >>> Site(5, Tap.PATTERN)
    Site(5, PATTERN)
    >>> Site(2, Tap.OUTPUT, Sublayer.FEEDFORWARD, stack="decoder")
    Site(2, OUTPUT, FEEDFORWARD, stack='decoder')
    """

    layer: int
    tap: Tap
    sublayer: Sublayer = Sublayer.ATTENTION
    stack: str = "main"

    def __post_init__(self) -> None:
        feedforward = self.sublayer is Sublayer.FEEDFORWARD
        if self.tap in _WHOLE_MODEL and self.layer != -1:
            raise ConfigError(f"{self.tap.name} belongs to no layer", "use layer=-1")
        if self.tap is Tap.INSIDE and not feedforward:
            raise ConfigError("INSIDE is a tap of the feed-forward", "add Sublayer.FEEDFORWARD")
        if feedforward and self.tap not in _ANY_SUBLAYER and self.tap is not Tap.INSIDE:
            remedy = "use BEFORE, READ, INSIDE, OUTPUT or AFTER"
            raise ConfigError(f"a feed-forward has no {self.tap.name}", remedy)

    def __repr__(self) -> str:
        parts = [str(self.layer), self.tap.name]
        if self.sublayer is not Sublayer.ATTENTION:
            parts.append(self.sublayer.name)
        if self.stack != "main":
            parts.append(f"stack={self.stack!r}")
        return f"Site({', '.join(parts)})"


@dataclass(frozen=True, eq=False)
class Patterns:
    """One h x t x s tensor per sequence: attention patterns, or the scores before the softmax."""

    each: tuple[Float[Tensor, "h _ _"], ...]

    def __len__(self) -> int:
        return len(self.each)

    def of(self, sequence: int) -> Float[Tensor, "h t s"]:
        return self.each[sequence]

    def shares(self, sequence: int) -> Float[Tensor, "h t s"]:
        """The pattern as shares of each row: that of attention itself.

        Of a mixer, whose weights may be negative, the absolute weights over their sum.
        """
        return self.of(sequence)


Seen = TypeVar("Seen", Ragged, Patterns)


@runtime_checkable
class Watcher(Protocol):
    """Watches a model: `see` may return another value, which the model then uses.

    A watcher that has a method `mix(site, query, key, value, request)` may compute the output of
    the heads itself, if it passes over all pairs anyway; it returns None where it does not.
    """

    def wants(self, site: Site) -> bool: ...

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns | None: ...


class Record:
    """A watcher that stores the values and changes nothing.

    >>> record = Record([Site(0, Tap.PATTERN)])
    >>> record.wants(Site(0, Tap.PATTERN)), record.wants(Site(1, Tap.PATTERN))
    (True, False)
    """

    def __init__(self, sites: Iterable[Site]) -> None:
        self.sites = frozenset(sites)
        self._values: dict[Site, Ragged | Patterns] = {}

    def wants(self, site: Site) -> bool:
        return site in self.sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        self._values[site] = value

    def __contains__(self, site: Site) -> bool:
        return site in self._values

    def __getitem__(self, site: Site) -> Ragged | Patterns:
        if site in self._values:
            return self._values[site]
        if site in self.sites:
            raise InputError(
                f"{site} has not been seen", "run a model that has this site, with watch=record"
            )
        names = ", ".join(sorted(map(str, self.sites)))
        raise InputError(f"{site} is not recorded", f"add it to Record([...]), which has {names}")


@dataclass(frozen=True, slots=True)
class WatchContext:
    """A watcher together with the sublayer that is being computed."""

    watcher: Watcher
    stack: str = "main"
    layer: int = -1
    sublayer: Sublayer = Sublayer.ATTENTION

    def within(self, *, layer: int, sublayer: Sublayer) -> "WatchContext":
        return replace(self, layer=layer, sublayer=sublayer)

    def wants(self, tap: Tap) -> bool:
        return self.watcher.wants(Site(self.layer, tap, self.sublayer, self.stack))

    def mix(self, query: Tensor, key: Tensor, value: Tensor, request: Any) -> Tensor | None:
        """The output of the heads from a watcher that computes it; None from all others."""
        mix = getattr(self.watcher, "mix", None)
        if mix is None:
            return None
        site = Site(self.layer, Tap.MIXED, self.sublayer, self.stack)
        output: Tensor | None = mix(site, query, key, value, request)
        return output

    def at(self, tap: Tap, value: Seen) -> Seen:
        """Show the watcher the value, if it wants it, and return the value to continue with."""
        site = Site(self.layer, tap, self.sublayer, self.stack)
        if not self.watcher.wants(site):
            return value
        answer = self.watcher.see(site, value)
        if answer is None:
            return value
        if isinstance(value, Patterns):
            if isinstance(answer, Patterns):
                return answer  # type: ignore[return-value]
        elif isinstance(answer, type(value)):
            return answer
        kind = Patterns if isinstance(value, Patterns) else Ragged
        raise InputError(
            f"the watcher returned {kind_of(answer)} at {site}",
            f"return a {kind.__name__}, or None to change nothing",
        )


def observe(context: WatchContext | None, tap: Tap, value: Tensor, like: Ragged) -> Tensor:
    """`value` after the watcher has seen it, as the sequences of `like`."""
    if context is None:
        return value
    return context.at(tap, like.with_values(value)).values
