"""Activations of every token, written to disk shard by shard, for training on them elsewhere."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.bridge import automatic, wrapped_parts
from manyheads.errors import InputError, MissingPackageError, check_int
from manyheads.formatting import pluralise
from manyheads.lens.inputs.cached_run import layer_input_site, layer_output_site
from manyheads.lens.inputs.texts import Inputs, for_each_batch
from manyheads.lens.results.addresses import Address, find_heads, heads_in
from manyheads.models import build, model_interface
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import HEAD_NAME, Head, Record, Site, Sublayer, Tap

Format = Literal["safetensors", "parquet"]
DtypeOfFile = Literal["float32", "float16", "bfloat16"]
MANIFEST = "activations.json"
SHARD_BYTES = 256 * 2**20
# Columns that say which token a row belongs to; a model that reads no tokens has the token -1.
INDEX = ("text", "position", "token")
PARTS = ("before", "after", "z", "attention", "cross", "feedforward")
FORM = (
    "write embeddings, final, L3.before, L3.after, L3.z, L3.attention, L3.feedforward or L3H5, "
    "with the stack in front where there are several: decoder.L3.after, decoder.cross.L3H5"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationFiles:
    """The files that `activations` wrote: the width of each site, and how much is in them."""

    folder: Path
    shards: tuple[Path, ...]
    widths: dict[str, int]
    tokens: int
    texts: int
    complete: bool = True

    def __str__(self) -> str:
        sites = ", ".join(f"{name} ({width})" for name, width in self.widths.items())
        part = "" if self.complete else ", interrupted"
        return (
            f"{self.tokens:,} tokens of {pluralise(self.texts, 'text')} in "
            f"{pluralise(len(self.shards), 'file')} of {self.folder}: {sites}{part}"
        )


@automatic.wrapping_models
def activations(
    model: build.Model,
    texts: Inputs,
    sites: Sequence[str | Head | Address | Site] | str | Head | Address | Site,
    folder: str | Path,
    *,
    format: Format = "safetensors",
    dtype: DtypeOfFile = "float32",
    shard_tokens: int | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ActivationFiles:
    """Write the activations of every token at some sites to files in `folder`.

    A site is the residual stream ("L3.before", "L3.after", "embeddings", "final"), what a sublayer
    adds to it ("L3.attention", "L3.feedforward"), the outputs of all heads of an attention before
    its output projection, side by side ("L3.z"), or those of single heads, named as in `ablate`:
    "L3H5", "L3" for each head of a layer, a `Head`. Several stacks: "decoder.L3.after",
    "decoder.cross.L3H5" or "decoder L3H5 cross"; all sites of one call are of one stack.

    Each file has one row per token: a tensor or column per site, and the `text`, the `position` and
    the `token` of the row. Texts of a similar length come together, so rows are not in the order of
    the texts. A file is complete or absent, and only about `shard_tokens` tokens are in memory, by
    default 256 MiB of them; `activations.json` lists the files at the end.
    """
    if shard_tokens is not None:
        check_int("shard_tokens", shard_tokens, minimum=1)
    target = Path(folder)
    _check_target(target, format, dtype)
    names = [sites] if isinstance(sites, str | Head | Address | Site) else list(sites)
    if not names:
        raise InputError("there are no sites", FORM)
    columns = [column for name in names for column in _columns(model, name)]
    if len({column.stack for column in columns}) > 1:
        raise InputError(
            "the sites belong to different stacks, whose tokens differ",
            "write those of each stack to a folder of its own",
        )
    writer = _ShardWriter(target, format, getattr(torch, dtype), shard_tokens)
    recorded_sites = [site for column in columns for site in column.sites]

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        seen = Record(recorded_sites)
        with torch.inference_mode():
            model.run_hidden(inputs, seen)
            values = {column.name: column.read(seen) for column in columns}
        ids = inputs.source if columns[0].stack == "encoder" else inputs.ids
        writer.add(values, ids, numbers)

    summary = for_each_batch(
        model, texts, visit, label="activations", batch_tokens=batch_tokens, progress=progress
    )
    writer.flush()
    result = ActivationFiles(
        folder=target,
        shards=tuple(writer.shards),
        widths=writer.widths,
        tokens=writer.tokens,
        texts=summary.texts,
        complete=summary.complete,
    )
    described = {
        "format": format,
        "dtype": dtype,
        "sites": result.widths,
        "tokens": result.tokens,
        "texts": result.texts,
        "complete": result.complete,
        "files": [shard.name for shard in result.shards],
    }
    with atomic_write(target / MANIFEST) as temporary:
        temporary.write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return result


def _check_target(folder: Path, format: str, dtype: str) -> None:
    if format == "parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError:
            raise MissingPackageError("a Parquet file", "pyarrow") from None
        if dtype == "bfloat16":
            raise InputError("Parquet has no bfloat16", "use float16 or float32, or safetensors")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty", "choose another folder")
    check_writable(folder / MANIFEST)


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """A site by the name that it was asked by, and the taps that it is read from."""

    name: str
    stack: str
    sites: tuple[Site, ...]
    head: int | None = None
    # The layer of a wrapped model whose writes are not seen directly.
    writes: tuple[wrapped_parts.WrappedStack, int, Sublayer] | None = None

    @classmethod
    def named(cls, model: build.Model, name: str) -> "_Column":
        stack_name, cross, rest = _split(model, name)
        stack = model.stacks()[stack_name]
        if rest in ("embeddings", "final"):
            return cls(name, stack_name, (Site(-1, Tap(rest), stack=stack_name),))
        match = re.fullmatch(r"L(\d+)\.(\w+)", rest)
        if match is None or match[2] not in PARTS:
            raise InputError(f"{name!r} is not a site", FORM)
        layer = int(match[1])
        if layer >= len(stack.layers):
            raise InputError(
                f"{name!r}: {stack_name} has no layer {layer}", f"use 0 to {len(stack.layers) - 1}"
            )
        if match[2] != "z":
            return _of_stream(name, stack, layer, match[2])
        sublayer = _sublayer(cross)
        if not heads_in(stack.config.layers[layer], sublayer):
            raise InputError(
                f"{name!r}: layer {layer} has no {sublayer.value}", "choose another layer"
            )
        return cls(name, stack_name, (Site(layer, Tap.HEAD_OUTPUT, sublayer, stack_name),))

    @classmethod
    def of_head(cls, address: Address, name: str = "") -> "_Column":
        prefix = "" if address.stack == "main" else f"{address.stack}."
        prefix += "cross." if address.sublayer is Sublayer.CROSS else ""
        site = Site(address.head.layer, Tap.HEAD_OUTPUT, address.sublayer, address.stack)
        name = name or f"{prefix}{address.head}"
        return cls(name, address.stack, (site,), address.head.head)

    def read(self, seen: Record) -> Float[Tensor, "n c"]:
        values = [cast(Ragged, seen[site]).values for site in self.sites]
        if self.head is not None:
            return values[0][:, self.head]
        if self.writes is None:
            return values[0].flatten(1)
        stack, layer, sublayer = self.writes
        written: dict[bool, Tensor] = {}
        kinds = [attention for attention, index in stack.facts.attentions if index == layer]
        for facts in kinds:
            site = Site(layer, Tap.OUTPUT, _sublayer(facts.cross), stack.name)
            write = cast(Ragged, seen[site]).values
            assert facts.write is not None
            write = write if facts.write.norm is None else facts.write.norm(write)
            written[facts.cross] = write * facts.write.factor
        if sublayer is not Sublayer.FEEDFORWARD:
            return written[sublayer is Sublayer.CROSS]
        before, after = values[0], values[1]
        return after - before - sum(written.values(), torch.zeros_like(before))


def _split(model: build.Model, name: str) -> tuple[str, bool, str]:
    """The stack of a site, whether it is of cross-attention, and the rest of its name."""
    stacks = model.stacks()
    parts = name.split(".")
    stack = model.readout_stack
    if parts[0] in stacks:
        stack, parts = parts[0], parts[1:]
    cross = bool(parts) and parts[0] == "cross"
    rest = ".".join(parts[1:] if cross else parts)
    if stack not in stacks:
        raise InputError(f"{name!r} names no stack", f"use one of: {', '.join(stacks)}")
    return stack, cross, rest


def _columns(model: build.Model, name: str | Head | Address | Site) -> list[_Column]:
    """The columns of a site, or of the heads that a name stands for."""
    if isinstance(name, Site):
        return [_Column(str(name), name.stack, (name,))]
    if isinstance(name, Head | Address):
        own_name = str(name) if isinstance(name, Head) else ""
        return [_Column.of_head(address, own_name) for address in find_heads(model, name)]
    columns = []
    for text in name.split(","):
        text = text.strip()
        stack, cross, rest = _split(model, text)
        if HEAD_NAME.fullmatch(rest) is None:
            columns.append(_Column.named(model, text))
            continue
        addresses = find_heads(model, rest, stack, _sublayer(cross))
        # A name of one head without spaces is the name of its column.
        own_name = text if len(addresses) == 1 and text == "".join(text.split()) else ""
        columns += [_Column.of_head(address, own_name) for address in addresses]
    return columns


def _sublayer(cross: bool) -> Sublayer:
    return Sublayer.CROSS if cross else Sublayer.ATTENTION


def _of_stream(name: str, stack: Stack, layer: int, part: str) -> _Column:
    before, after = layer_input_site(stack, layer), layer_output_site(stack, layer)
    if part in ("before", "after"):
        return _Column(name, stack.name, (before if part == "before" else after,))
    sublayer, config = Sublayer(part), stack.config.layers[layer]
    slots = {
        Sublayer.ATTENTION: config.attention or config.mixer,
        Sublayer.CROSS: config.cross,
        Sublayer.FEEDFORWARD: config.feedforward,
    }
    present = slots[sublayer] is not None
    sites: tuple[Site, ...] = (Site(layer, Tap.OUTPUT, sublayer, stack.name),)
    writes = None
    if isinstance(stack, wrapped_parts.WrappedStack):
        facts = [attention for attention, index in stack.facts.attentions if index == layer]
        unseen = any(attention.write is None for attention in facts)
        if stack.facts.slots > 1 or not facts or unseen:
            raise InputError(
                f"{name!r}: what this layer adds was not found in the wrapped model",
                "use L3.before and L3.after, or L3.z",
            )
        written = [_sublayer(attention.cross) for attention in facts]
        present = sublayer in (*written, Sublayer.FEEDFORWARD)
        outputs = (Site(layer, Tap.OUTPUT, side, stack.name) for side in written)
        sites, writes = (before, after, *outputs), (stack, layer, sublayer)
    if not present:
        raise InputError(f"{name!r}: layer {layer} has no {part}", "choose another site")
    return _Column(name, stack.name, sites, writes=writes)


@dataclass(slots=True, eq=False)
class _ShardWriter:
    """Collects rows and writes a file whenever there are enough."""

    folder: Path
    format: Format
    dtype: torch.dtype
    limit: int | None
    shards: list[Path] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    _parts: list[dict[str, Tensor]] = field(default_factory=list)
    _held: int = 0

    def add(self, values: dict[str, Tensor], ids: Ragged | None, numbers: list[int]) -> None:
        first = next(iter(values.values()))
        if not self.widths:
            self.widths = {name: column.shape[1] for name, column in values.items()}
        rows = {name: column.to("cpu", self.dtype) for name, column in values.items()}
        rows |= _index(ids, numbers, len(first))
        self.tokens += len(first)
        per_row = sum(self.widths.values()) * self.dtype.itemsize + 8 * len(INDEX)
        limit = self.limit or max(1, SHARD_BYTES // per_row)
        start = 0
        while start < len(first):
            stop = min(len(first), start + limit - self._held)
            self._parts.append({name: column[start:stop] for name, column in rows.items()})
            self._held += stop - start
            start = stop
            if self._held >= limit:
                self.flush()

    def flush(self) -> None:
        if not self._parts:
            return
        rows = {name: torch.cat([part[name] for part in self._parts]) for name in self._parts[0]}
        self._parts, self._held = [], 0
        path = self.folder / f"activations-{len(self.shards):05}.{self.format}"
        with atomic_write(path) as temporary:
            if self.format == "safetensors":
                from safetensors.torch import save_file

                save_file(rows, temporary)
            else:
                _write_parquet(rows, temporary)
        self.shards.append(path)


def _index(ids: Ragged | None, numbers: list[int], rows: int) -> dict[str, Tensor]:
    """The text, the position and the token of each row."""
    if ids is not None and ids.lengths.total == rows:
        lengths, tokens = ids.lengths.each, ids.values.cpu().long()
    else:
        # Patches and frames have no tokens, and all texts of a batch have as many of them.
        lengths, tokens = (rows // len(numbers),) * len(numbers), torch.full((rows,), -1)
    pairs = list(zip(numbers, lengths, strict=True))
    return {
        "text": torch.cat([torch.full((length,), number) for number, length in pairs]),
        "position": torch.cat([torch.arange(length) for length in lengths]),
        "token": tokens,
    }


def _write_parquet(rows: dict[str, Tensor], path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {}
    for name, column in rows.items():
        columns[name] = pyarrow.array(column.flatten().numpy())
        if column.dim() > 1:
            wide = pyarrow.FixedSizeListArray.from_arrays(columns[name], column.shape[1])
            columns[name] = wide
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
