"""Low-rank updates of a projection, and projections with adapters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError
from manyheads.lens.results.addresses import HeadName, Heads, head_names
from manyheads.surgery.lora.modules_to_save import ModuleName
from manyheads.surgery.lora.quantization import Quantized
from manyheads.surgery.lora.targets import Spans


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv 2106.09685): W + scale * up @ down, where `up` and `down` are trained.

    `targets` are names of projections or patterns of their addresses: query, key, value, output,
    expand and contract (of a gated feed-forward, gate and up), "*.layers.3.cross.query". Rows that
    are joined in one matrix share one `down` under its own name, "project". Chosen `heads` have
    only their own rows (of the output, columns) updated. The scale is alpha / rank, or
    alpha / sqrt(rank) with `scaling="root"` (arXiv 2312.03732). `dropout` drops inputs in training.
    `modules_to_save` are trained in full, in a copy that is saved with the adapter: a new readout
    for a task, or the embedding.
    """

    rank: PositiveInt = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("query", "value")
    layers: tuple[int, ...] | Literal["all"] = "all"
    heads: tuple[HeadName, ...] | Heads = ()
    dropout: DropoutRate = 0.0
    scaling: Literal["rank", "root"] = "rank"
    modules_to_save: tuple[ModuleName, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", head_names(self.heads))
        if not self.targets:
            raise ConfigError("targets is empty", 'name projections, such as "query"')

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))


class LowRankUpdate(nn.Module):
    """scale * up @ down on some rows and columns of a projection, and zero elsewhere."""

    def __init__(
        self,
        *,
        rank: int,
        scale: float,
        dropout: float,
        shape: tuple[int, int],
        rows: Spans,
        columns: Spans,
        root: bool = False,
    ) -> None:
        super().__init__()
        self.rank, self.scale, self.root = rank, scale, root
        self.shape, self.rows, self.columns = shape, rows, columns
        self.down = nn.Linear(_count(columns), rank, bias=False)
        self.up = nn.Linear(rank, _count(rows), bias=False)
        self.dropout = nn.Dropout(dropout)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        """As in the paper: `up` starts at zero, so that the output does not change."""
        weight = torch.empty(self.down.weight.shape)
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        self.down.weight.copy_(weight)
        self.up.weight.zero_()

    def add(
        self, output: Float[Tensor, "*n rows"], x: Float[Tensor, "*n columns"]
    ) -> Float[Tensor, "*n rows"]:
        """Add the update to `output`, in place where only some rows change."""
        inputs = x
        if self.columns != ((0, self.shape[1]),):
            inputs = torch.cat([x[..., start:stop] for start, stop in self.columns], dim=-1)
        # Autocast converts both to one type by itself.
        if not torch.is_autocast_enabled(x.device.type):
            inputs = inputs.to(self.down.weight.dtype)
        # Scaled here, where there are fewer channels.
        inside = self.down(self.dropout(inputs)) * self.scale
        more = self.up(inside).to(output.dtype)
        if self.rows == ((0, self.shape[0]),):
            return output + more
        place = 0
        for start, stop in self.rows:
            length = stop - start
            output[..., start:stop].add_(more[..., place : place + length])
            place += length
        return output

    def full(self) -> Float[Tensor, "rows columns"]:
        """The update of the full weight."""
        change = self.scale * (self.up.weight @ self.down.weight)
        if (self.rows, self.columns) == (((0, self.shape[0]),), ((0, self.shape[1]),)):
            return change
        full = change.new_zeros(self.shape)
        rows, columns = (span_indices(spans, full.device) for spans in (self.rows, self.columns))
        return full.index_put((rows[:, None], columns[None, :]), change)


class Adapted(nn.Linear):
    """A projection with active adapters.

    `weight` is its own weight plus the active updates; the state dictionary and the parameters have
    its own weight only. Without active adapters a projection gets its plain class back, for which
    there are faster paths.
    """

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        own = self.own_weight()
        for update in updates_of(self, active_on(self)):
            own = own + update.full().to(own.dtype)
        return own

    def own_weight(self) -> Tensor:
        return cast(Tensor, self._parameters["weight"])

    def base_output(self, x: Tensor) -> Tensor:
        return F.linear(x, self.own_weight(), self.bias)

    def forward(self, x: Float[Tensor, "*n c"]) -> Float[Tensor, "*n rows"]:
        output = self.base_output(x)
        for update in updates_of(self, active_on(self)):
            output = update.add(output, x)
        return output


class AdaptedQuantized(Adapted, Quantized):
    """The same with four-bit weights."""

    def own_weight(self) -> Tensor:
        return self.unpacked(self.kind)

    def base_output(self, x: Tensor) -> Tensor:
        return Quantized.forward(self, x)


ADAPTED: dict[type[nn.Linear], type[Adapted]] = {nn.Linear: Adapted, Quantized: AdaptedQuantized}
PLAIN = {adapted: plain for plain, adapted in ADAPTED.items()}


def attach(linear: nn.Linear, name: str, part: str, update: LowRankUpdate) -> None:
    """Add an update under the name of an adapter; it is not active yet."""
    if not hasattr(linear, "adapters"):
        linear.adapters = nn.ModuleDict()
        set_active(linear, ())
        set_merged(linear, ())
    held = cast(nn.ModuleDict, linear.adapters)
    if name not in held:
        held[name] = nn.ModuleDict()
    cast(nn.ModuleDict, held[name])[part] = update


def adapters_on(linear: nn.Linear) -> dict[str, dict[str, LowRankUpdate]]:
    """Updates by adapter and part."""
    held = cast(nn.ModuleDict, linear._modules.get("adapters") or {})
    return {
        name: {
            part: cast(LowRankUpdate, update) for part, update in cast(nn.ModuleDict, parts).items()
        }
        for name, parts in held.items()
    }


def updates_of(linear: nn.Linear, names: tuple[str, ...]) -> Iterator[LowRankUpdate]:
    """The updates of some adapters."""
    held = cast(nn.ModuleDict, linear.adapters)
    for name in names:
        if name in held:
            yield from cast(nn.ModuleDict, held[name]).values()  # type: ignore[misc]


def active_on(linear: nn.Linear) -> tuple[str, ...]:
    return cast(tuple[str, ...], linear.__dict__.get("active", ()))


def merged_on(linear: nn.Linear) -> tuple[str, ...]:
    return cast(tuple[str, ...], linear.__dict__.get("merged", ()))


def set_merged(linear: nn.Linear, names: tuple[str, ...]) -> None:
    linear.__dict__["merged"] = names


def set_active(linear: nn.Linear, names: tuple[str, ...]) -> None:
    """Set the active adapters; with none the projection gets its plain class back."""
    present = tuple(name for name in names if name in adapters_on(linear))
    linear.__dict__["active"] = present
    kind = type(linear)
    target = ADAPTED.get(kind, kind) if present else PLAIN.get(cast(type[Adapted], kind), kind)
    linear.__class__ = target


@torch.no_grad()
def add_to_weight(linear: nn.Linear, names: tuple[str, ...], sign: Literal[1, -1]) -> None:
    """Add the updates to the weight, or subtract them; they are summed in float32."""
    own = cast(Tensor, linear._parameters["weight"])
    change = sum(update.full().to(own.device) for update in updates_of(linear, names))
    if isinstance(change, Tensor):
        own.copy_((own.to(change.dtype) + sign * change).to(own.dtype))


def remove_adapter(linear: nn.Linear, name: str) -> None:
    """Remove an adapter; without the last one the projection is a plain one."""
    set_active(linear, tuple(adapter for adapter in active_on(linear) if adapter != name))
    set_merged(linear, tuple(adapter for adapter in merged_on(linear) if adapter != name))
    held = cast(nn.ModuleDict, linear.adapters)
    if name in held:
        del held[name]
    if not held:
        del linear.adapters
        for attribute in ("active", "merged"):
            linear.__dict__.pop(attribute)


def span_indices(spans: Spans, device: torch.device | None = None) -> Tensor:
    """All indices of some spans, in order.

    >>> span_indices(((0, 2), (5, 6))).tolist()
    [0, 1, 5]
    """
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in spans])


def _count(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)
