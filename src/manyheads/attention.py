"""The attention layer: project, rotate, attend, gate, project back."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, PositiveFloat, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import CacheSlot, KeyValues, StaticCachePlan
from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.kernels import reference, ring
from manyheads.kernels.choose import Choice, attend, choose
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts import head_groups, linear_layout, masks
from manyheads.parts.gates import GATE_TAPS, Gate, GatePlace, check_gates
from manyheads.parts.norms import NoNorm, Norm, make_norm
from manyheads.parts.positions import (
    Alibi,
    AttentionPosition,
    Disentangled,
    NoPosition,
    Rotary,
    Shaw,
    T5Buckets,
    disentangled,
)
from manyheads.parts.positions.alibi import AlibiBias
from manyheads.parts.positions.relative import Bias, BucketBias, BucketTable, ShawTable
from manyheads.parts.positions.rotary import Rotation
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Tap, WatchContext, observe


def drop_heads(
    output: Float[Tensor, "n h d"], lengths: Lengths, probability: float
) -> Float[Tensor, "n h d"]:
    """Zero some heads of each sequence and scale the others up to compensate."""
    heads = output.shape[1]
    keep = torch.rand(lengths.count, heads, device=output.device)
    keep = (keep >= probability).to(output.dtype)
    keep = keep * (heads / keep.sum(1, keepdim=True).clamp(min=1))
    return output * keep[lengths.sequence_of_token].unsqueeze(-1)


# Positions as a layer uses them, computed once per forward pass and shared by layers that agree.
PositionEncoding = Rotation | AlibiBias | BucketBias | disentangled.RelativeVectors | None

OWNER_PASSES = "the layer that owns the table passes it in"
# Named, because torch.compile cannot trace the default of a dataclass made inside the graph.
OUTPUT_ALONE = Want()


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The config of an attention layer.

    With `kv_heads` below `heads`, query heads share keys and values (GQA, arXiv 2305.13245; one is
    MQA, arXiv 1911.02150). (4, 3) are two key heads that serve four and three query heads.
    `keys_from="memory"` makes it cross-attention. `drop_heads` drops whole heads of a sequence in
    training (DropHead, arXiv 2004.13342). A learned `sink` is one more score in each head's softmax
    that carries no value. `softcap` bends scores s to softcap * tanh(s / softcap), as in Gemma 2.
    `query_norm` and `key_norm` norm each head, with `norm_span="heads"` all heads together;
    `output_norm` norms what each head read, before gates and the output projection.

    >>> config = AttentionConfig(width=768, heads=12, kv_heads=4)
    >>> config.size, config.key_heads
    (64, 4)
    >>> AttentionConfig(width=768, heads=12, kv_heads=5)
    Traceback (most recent call last):
    manyheads.errors.ConfigError: kv_heads must divide heads=12 (1, 2, 3, 4, 6 or 12), got 5.
    """

    width: PositiveInt
    heads: PositiveInt
    kv_heads: head_groups.KeyHeads = "each"
    head_size: PositiveInt | Literal["even"] = "even"
    position: AttentionPosition = NoPosition()
    mask: masks.Mask = masks.Full()
    gates: tuple[Gate, ...] = ()
    query_norm: Norm = NoNorm()
    key_norm: Norm = NoNorm()
    norm_span: Literal["head", "heads"] = "head"
    output_norm: Norm = NoNorm()
    bias: Literal["none", "inputs", "output", "all"] = "none"
    scale: float | Literal["root"] = "root"
    softcap: PositiveFloat | Literal["none"] = "none"
    sink: Literal["none", "learned"] = "none"
    head_scale: Literal["none", "learned"] = "none"
    dropout: DropoutRate = 0.0
    drop_heads: DropoutRate = 0.0
    keys_from: Literal["itself", "memory"] = "itself"
    kernel: str = "auto"

    def __post_init__(self) -> None:
        if self.head_size == "even" and self.width % self.heads:
            near = head_groups.nearest(head_groups.divisors(self.width), self.heads)
            raise ConfigError(
                f"heads must divide width={self.width}, got {self.heads}",
                f"use {head_groups.listed(near)} heads, or set head_size",
            )
        kv_heads = head_groups.normalize_kv_heads(self.heads, self.kv_heads)
        object.__setattr__(self, "kv_heads", kv_heads)
        if isinstance(self.position, Rotary):
            self.position.rotated_channels(self.size)
        if isinstance(self.position, Alibi):
            self.position.slopes(self.heads)
        if self.keys_from == "memory" and not isinstance(self.position, NoPosition):
            raise ConfigError(
                f"{type(self.position).__name__} encodes distances within one sequence, "
                "and the memory is another one",
                "use NoPosition() in cross-attention",
            )
        check_gates(self.gates, self.width, self.heads)

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads if self.head_size == "even" else self.head_size

    @property
    def key_heads(self) -> int:
        """Heads of keys and values."""
        return len(head_groups.groups_of(self.heads, self.kv_heads))

    @property
    def groups(self) -> tuple[int, ...] | None:
        """How many query heads each key head serves; None if all serve the same number."""
        return self.kv_heads if isinstance(self.kv_heads, tuple) else None

    @property
    def owners(self) -> tuple[int, ...]:
        """For each query head, the head of keys and values that it reads."""
        return head_groups.key_head_of_query(head_groups.groups_of(self.heads, self.kv_heads))

    @property
    def score_scale(self) -> float:
        return self.size**-0.5 if self.scale == "root" else self.scale

    @property
    def score_cap(self) -> float | None:
        return None if self.softcap == "none" else self.softcap

    @property
    def shares_position(self) -> bool:
        """Whether layers with the same config can use one `PositionEncoding`."""
        if isinstance(self.position, T5Buckets):
            return self.position.shared
        return not isinstance(self.position, Shaw)

    def gate_shape(self, at: GatePlace) -> tuple[int, int]:
        """The heads and channels that a gate at this point applies to."""
        match at:
            case "key" | "value":
                return self.key_heads, self.size
            case "query" | "output":
                return self.heads, self.size
            case "final":
                counts = [gate.slice_count(self.heads) for gate in self.gates if gate.at == at]
                slices = counts[0] if counts else self.heads
                return slices, self.width // slices

    def rows(self) -> dict[str, int]:
        """The rows of the input projection by name: first of the queries, then of the keys."""
        keys = dict.fromkeys(("key", "value"), self.key_heads * self.size)
        return self.query_rows() | keys | self._gate_rows("key", "value")

    def query_rows(self) -> dict[str, int]:
        """The rows that read the tokens themselves, even if keys come from a memory."""
        return {"query": self.heads * self.size} | self._gate_rows("query", "output", "final")

    def _gate_rows(self, *places: GatePlace) -> dict[str, int]:
        return {
            f"gate_{gate.at}": gate.rows(*self.gate_shape(gate.at))
            for gate in self.gates
            if gate.at in places and gate.reads == "input"
        }


class Attention(nn.Module):
    """Attention over a ragged batch; all projections of one input are one matrix.

    >>> layer = Attention(AttentionConfig(width=16, heads=4))
    >>> batch = Ragged.from_list([torch.randn(5, 16), torch.randn(2, 16)])
    >>> layer(batch).lengths.each
    (5, 2)
    """

    def __init__(self, config: AttentionConfig, *, owns_table: bool = True) -> None:
        super().__init__()
        self.config = config
        rows, biased = config.rows(), config.bias in ("inputs", "all")
        reads_memory = config.keys_from == "memory"
        self.our_rows = config.query_rows() if reads_memory else rows
        bare = isinstance(config.query_norm, NoNorm) and isinstance(config.key_norm, NoNorm)
        bare = bare and not any(gate.at in ("query", "key") for gate in config.gates)
        self.plain = bare and list(self.our_rows) == ["query", "key", "value"]
        self.memory_rows = {name: rows[name] for name in rows if name not in self.our_rows}
        self.project = nn.Linear(config.width, sum(self.our_rows.values()), bias=biased)
        self.project_memory: nn.Linear | None = None
        if reads_memory:
            memory = sum(self.memory_rows.values())
            self.project_memory = nn.Linear(config.width, memory, bias=biased)
        inner = config.heads * config.size
        self.output = nn.Linear(inner, config.width, bias=config.bias in ("output", "all"))
        whole = config.norm_span == "heads"
        self.query_norm = make_norm(config.query_norm, inner if whole else config.size)
        keys = config.key_heads * config.size
        self.key_norm = make_norm(config.key_norm, keys if whole else config.size)
        self.output_norm = make_norm(config.output_norm, config.size)
        for gate in config.gates:
            if gate.reads == "nothing":
                zeros = torch.zeros(gate.rows(*config.gate_shape(gate.at)))
                self.register_parameter(f"gate_{gate.at}", nn.Parameter(zeros))
        self.sink = nn.Parameter(torch.zeros(config.heads)) if config.sink != "none" else None
        scaled = config.head_scale != "none"
        self.head_scale = nn.Parameter(torch.ones(config.heads)) if scaled else None
        self.table: BucketTable | disentangled.DisentangledTable | ShawTable | None = None
        self.distances: disentangled.DistanceProjections | None = None
        if isinstance(config.position, T5Buckets) and owns_table:
            self.table = BucketTable(config.position, config.heads)
        if isinstance(config.position, Shaw):
            self.table = ShawTable(config.position, config.size)
        if isinstance(config.position, Disentangled):
            if owns_table:
                self.table = disentangled.DisentangledTable(config.position, config.width)
            if config.position.projections == "own":
                project = disentangled.DistanceProjections(config.position, config.width, rows)
                self.distances = project

    def encode_positions(
        self, positions: Int[Tensor, " n"], lengths: Lengths | None = None
    ) -> PositionEncoding:
        """The positions as this layer uses them; layers of the same config can share them.

        Without `lengths` each token counts as the last of its text.
        """
        match self.config.position:
            case Rotary() as rotary:
                return rotary.rotation(positions, self.config.size, lengths)
            case Alibi() as alibi:
                return alibi.bias(self.config.heads, positions.device)
            case T5Buckets():
                assert isinstance(self.table, BucketTable), OWNER_PASSES
                return self.table.bias()
            case Disentangled():
                assert isinstance(self.table, disentangled.DisentangledTable), OWNER_PASSES
                return self.table.encode()
            case _:
                return None

    def forward(
        self,
        x: Ragged,
        *,
        memory: Ragged | KeyValues | None = None,
        encoding: PositionEncoding | Literal["own"] = "own",
        cache: CacheSlot | None = None,
        context: WatchContext | None = None,
    ) -> Ragged:
        if x.values.shape[-1] != self.config.width:
            raise ShapeError(
                f"the tokens have {x.values.shape[-1]} channels, and the layer's width is "
                f"{self.config.width}",
                "give tokens of that width",
            )
        if encoding == "own":
            positions = x.lengths.positions if cache is None else cache.plan.positions
            encoding = self.encode_positions(positions, x.lengths)
        parts = self._parts(x.values)
        # Keys in a cache, keys that processes pass on and what a watcher sees are rotated here;
        # otherwise the kernel may do it.
        alone = cache is None and context is None and x.lengths.shard is None
        late = self.plain and alone
        inside = encoding if late and isinstance(encoding, Rotation) else None
        rotation = encoding if inside is None else None
        query = self._gated("query", self._heads(parts["query"]), parts, x, context)
        query = self._normed(self.query_norm, query)
        query = rotation(query) if isinstance(rotation, Rotation) else query
        query = observe(context, Tap.QUERY, query, x)
        keys = self._keys(parts, x, memory, rotation, cache, context)
        if keys.lengths.count != x.lengths.count:
            raise ShapeError(
                f"the batch has {x.lengths.count} sequences, and the memory {keys.lengths.count}",
                "give one memory per sequence",
            )
        # Keys in a cache may have gaps between sequences; only this bias reads the keys themselves.
        by_content = isinstance(encoding, disentangled.RelativeVectors)
        key = Ragged(keys.k, keys.lengths) if by_content else None
        bias = self.bias(x.with_values(query), key, encoding)
        request = self._request(x.lengths, keys.lengths, bias, inside)
        output = mix(query, keys.k, keys.v, request, context, self.config.kernel)
        output = observe(context, Tap.MIXED, output, x)
        output = self.output_norm(output).to(output.dtype)
        if self.head_scale is not None:
            output = output * self.head_scale.to(output.dtype)[:, None]
        if self.training and self.config.drop_heads:
            output = drop_heads(output, x.lengths, self.config.drop_heads)
        output = self._gated("output", output, parts, x, context)
        output = observe(context, Tap.HEAD_OUTPUT, output, x)
        written = self.output(output.flatten(1))
        if any(gate.at == "final" for gate in self.config.gates):
            sliced = written.unflatten(-1, self.config.gate_shape("final"))
            written = self._gated("final", sliced, parts, x, context).flatten(1)
        return x.with_values(written)

    def remember(self, memory: Ragged, context: WatchContext | None = None) -> KeyValues:
        """The keys and values of a memory, which a cache keeps while decoding."""
        if self.project_memory is None:
            remedy = 'use keys_from="memory"'
            raise InputError("this layer is self-attention and takes no memory", remedy)
        parts = linear_layout.split_linear(self.project_memory, memory.values, self.memory_rows)
        return KeyValues(*self._key_value(parts, memory, None, context), memory.lengths)

    def explain(self, queries: Lengths, keys: Lengths, encoding: PositionEncoding) -> Choice:
        """Which kernel would serve these lengths, and why."""
        config, weight = self.config, self.project.weight
        if config.kernel != "auto":
            return Choice(config.kernel, (("auto", "this kernel was requested by name"),))
        shapes = [(queries, config.heads), (keys, config.key_heads), (keys, config.key_heads)]
        q, k, v = (
            weight.new_zeros(lengths.total, heads, config.size, requires_grad=weight.requires_grad)
            for lengths, heads in shapes
        )
        bias = self.bias(Ragged(q, queries), Ragged(k, keys), encoding)
        request = self._request(queries, keys, bias)
        return choose(request, TensorFacts.of(q, k, v, request))

    @property
    def input_layers(self) -> list[tuple[str, nn.Linear, dict[str, int]]]:
        """The input projections by name, with the number of rows of each of their parts."""
        layers = [("project", self.project, self.our_rows)]
        if self.project_memory is not None:
            layers.append(("project_memory", self.project_memory, self.memory_rows))
        return layers

    @property
    def gate_parameters(self) -> dict[str, nn.Parameter]:
        """The logits of gates that do not read the input, named as rows of gates are."""
        names = (f"gate_{gate.at}" for gate in self.config.gates if gate.reads == "nothing")
        return {name: getattr(self, name) for name in names}

    def projections(self) -> dict[str, Float[Tensor, "rows c"]]:
        """The rows of each part of the input projections, as views of their weight."""
        columns: dict[str, Tensor] = {}
        for _, linear, rows in self.input_layers:
            columns |= _split(linear.weight.T, rows)
        return {name: part.T for name, part in columns.items()}

    def _heads(self, x: Float[Tensor, "n *rows"]) -> Float[Tensor, "n h d"]:
        return x if x.dim() == 3 else rearrange(x, "n (h d) -> n h d", d=self.config.size)

    def _parts(self, x: Float[Tensor, "n c"]) -> dict[str, Float[Tensor, "n *rows"]]:
        """The rows of the projection by name, of plain queries, keys and values by head."""
        if self.plain and linear_layout.is_aligned(self.our_rows):
            # Split by head, as kernels join the gradients of the three: nothing is copied.
            heads = (self.config.heads, self.config.key_heads, self.config.key_heads)
            parts = self._heads(self.project(x)).split(heads, dim=1)
            return dict(zip(self.our_rows, parts, strict=True))
        return linear_layout.split_linear(self.project, x, self.our_rows)

    def _key_value(
        self,
        parts: dict[str, Tensor],
        source: Ragged,
        encoding: PositionEncoding,
        context: WatchContext | None,
    ) -> tuple[Float[Tensor, "m g d"], Float[Tensor, "m g d"]]:
        key = self._gated("key", self._heads(parts["key"]), parts, source, context)
        key = self._normed(self.key_norm, key)
        if isinstance(encoding, Rotation):
            key = encoding(key)
        value = self._gated("value", self._heads(parts["value"]), parts, source, context)
        return observe(context, Tap.KEY, key, source), observe(context, Tap.VALUE, value, source)

    def _keys(
        self,
        parts: dict[str, Tensor],
        x: Ragged,
        memory: Ragged | KeyValues | None,
        encoding: PositionEncoding,
        cache: CacheSlot | None,
        context: WatchContext | None,
    ) -> KeyValues:
        if self.project_memory is not None:
            if memory is None:
                raise InputError("cross-attention got no memory", "pass memory=")
            return memory if isinstance(memory, KeyValues) else self.remember(memory, context)
        if memory is not None:
            raise InputError("this layer is self-attention and takes no memory", "leave it out")
        key, value = self._key_value(parts, x, encoding, context)
        if cache is None:
            return KeyValues(key, value, x.lengths)
        if isinstance(cache.plan, StaticCachePlan):
            return cache.store.step(key, value, cache.plan)
        # A bias and a watcher take the distance between tokens from the order of the keys.
        ordered = _opens(context) or not isinstance(self.config.position, NoPosition | Rotary)
        return cache.store.append(key, value, cache.plan, ordered=ordered)

    def _request(
        self,
        queries: Lengths,
        keys: Lengths,
        bias: Bias | None,
        rotation: Rotation | None = None,
    ) -> Request:
        return Request(
            queries=queries,
            keys=keys,
            mask=self.config.mask,
            scale=self.config.score_scale,
            bias=bias,
            sink=self.sink,
            softcap=self.config.score_cap,
            dropout=self.config.dropout if self.training else 0.0,
            groups=self.config.groups,
            rotation=rotation,
            want=OUTPUT_ALONE,
        )

    def bias(self, query: Ragged, key: Ragged | None, encoding: PositionEncoding) -> Bias | None:
        """What positions add to the scores of these queries and keys."""
        if isinstance(self.table, ShawTable):
            return self.table.bias(query.values, self.config.score_scale)
        if isinstance(encoding, disentangled.RelativeVectors):
            assert key is not None, "the distances are compared with the keys"
            return self._disentangled(query, key, encoding)
        return None if isinstance(encoding, Rotation) else encoding

    def _disentangled(
        self, query: Ragged, key: Ragged, encoding: disentangled.RelativeVectors
    ) -> disentangled.DisentangledBias:
        position, config = encoding.config, self.config
        vectors, index = encoding.within(key.lengths.longest)
        vectors = F.dropout(vectors, position.dropout, self.training)
        if self.distances is None:
            parts = linear_layout.split_linear(self.project, vectors, self.our_rows)
        else:
            parts = self.distances(vectors)
        shared = config.key_heads < config.heads
        owners = list(config.owners)
        distance_query = self._heads(parts["query"]) if position.counts_position else None
        distance_key = self._heads(parts["key"]) if position.counts_content else None
        if distance_key is not None and shared:
            distance_key = distance_key[:, owners]
        return disentangled.DisentangledBias.of(
            query.values,
            key.values[:, owners] if shared else key.values,
            (distance_query, distance_key, index),
            (query.lengths, key.lengths),
            config.score_scale,
        )

    def _normed(self, norm: nn.Module, x: Float[Tensor, "n h d"]) -> Float[Tensor, "n h d"]:
        """Each head normed, or all heads together."""
        whole = self.config.norm_span == "heads"
        normed: Tensor = norm(x.flatten(1)).unflatten(1, x.shape[1:]) if whole else norm(x)
        # Autocast computes norms in float32, and the kernels need one dtype for all three.
        return normed.to(x.dtype)

    def _gated(
        self,
        at: GatePlace,
        value: Float[Tensor, "n h d"],
        parts: dict[str, Tensor],
        source: Ragged,
        context: WatchContext | None,
    ) -> Float[Tensor, "n h d"]:
        for gate in self.config.gates:
            if gate.at == at:
                opened = self._opened(gate, value, parts)
                opened = observe(context, GATE_TAPS[at], opened, source)
                value = gate.apply(value, opened)
        return value

    def _opened(
        self, gate: Gate, value: Float[Tensor, "n h d"], parts: dict[str, Tensor]
    ) -> Float[Tensor, "n heads_or_1 size_or_1"]:
        shape = self.config.gate_shape(gate.at)
        match gate.reads:
            case "input":
                return gate.values(parts[f"gate_{gate.at}"], *shape)
            case "itself":
                return gate.values(value.flatten(1), *shape)
            case "nothing":
                opened = gate.values(self.gate_parameters[f"gate_{gate.at}"][None], *shape)
                return opened.to(value.dtype).expand(len(value), -1, -1)


def mix(
    query: Float[Tensor, "n h d"],
    key: Float[Tensor, "m g d"],
    value: Float[Tensor, "m g e"],
    request: Request,
    context: WatchContext | None = None,
    kernel: str = "auto",
) -> Float[Tensor, "n h e"]:
    """The output of each head; a watcher may replace the scores and the pattern, or compute it."""
    if request.queries.shard is not None:
        if _opens(context):
            raise InputError(
                "scores and patterns are of whole texts, which several processes share here",
                "watch them in one process",
            )
        return ring.attend(query, key, value, request, kernel).output
    if context is None:
        return attend(query, key, value, request, kernel).output
    if not _opens(context):
        mixed = context.mix(query, key, value, request)
        return attend(query, key, value, request, kernel).output if mixed is None else mixed
    scores = context.at(Tap.SCORES, reference.scores(query, key, request))
    pattern = context.at(Tap.PATTERN, reference.patterns(scores, request))
    return reference.mix(pattern, value, request).reshape(*query.shape[:2], value.shape[2])


def _opens(context: WatchContext | None) -> bool:
    """Whether a watcher wants what only the reference kernel computes."""
    return context is not None and (context.wants(Tap.SCORES) or context.wants(Tap.PATTERN))


def _split(joined: Float[Tensor, "n rows"], rows: dict[str, int]) -> dict[str, Tensor]:
    return dict(zip(rows, joined.split(list(rows.values()), dim=-1), strict=True))
