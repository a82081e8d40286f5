"""One text through one layer of an open model, number by number, and three texts in one batch."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.attention import Attention
from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.bridge.wrapped_parts import WrappedStack
from manyheads.errors import InputError
from manyheads.explain.layer_walk import Stage, stage_sites
from manyheads.kernels import reference
from manyheads.lens.inputs.cached_run import final_hidden
from manyheads.lens.measure.score_tiles import ScoreReader, TiledScores
from manyheads.lens.results.addresses import (
    attention_at,
    blocks_of,
    heads_in,
    mask_in,
    output_weight,
)
from manyheads.models.build import eval_mode
from manyheads.models.encoder import TextModel
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.model_interface import ModelInputs
from manyheads.models.stack import Stack
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import MLP
from manyheads.parts.gates import GATE_TAPS
from manyheads.parts.masks import Full, Mask, visible
from manyheads.parts.norms import NoNorm, Placement
from manyheads.parts.positions import Alibi, Axial, Learned, NoPosition, Rotary, Sinusoidal
from manyheads.ragged import Lengths, Ragged
from manyheads.studio.models import LoadedModel, StudioInput
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap, WatchContext

# What fits on the page: tokens, channels of the residual stream, and of a head among all heads.
MAX_TOKENS = 24
MAX_CHANNELS = 64
MAX_JOINED = 8
MAX_PAIRS = 6
MAX_NEURONS = 3
MAX_TEXTS = 3
# Of a layer without a norm, and of one whose norms are not known.
NO_NORM: dict[str, str | None] = {"name": None, "placement": None}
# More digits than the page shows, so that it can compute with them.
DIGITS = 7


class LayerRecord(Record):
    """The stages of one layer, and its scores as the kernel is asked for them."""

    def __init__(self, stack: Stack, layer: int) -> None:
        self.name, self.layer = stack.name, layer
        self.scores: TiledScores | None = None
        self._reader = ScoreReader({stack.name: stack})
        taps = (Tap.BEFORE, Tap.MIXED, *GATE_TAPS.values())
        sites = [*stage_sites(layer).values(), *(Site(layer, tap) for tap in taps)]
        sites += [Site(layer, Tap.BEFORE, Sublayer.FEEDFORWARD), Site(-1, Tap.FINAL)]
        super().__init__(replace(site, stack=stack.name) for site in sites)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        super().see(site, value)
        if self._reader.wants(site):
            self.scores = self._reader.see(site, value) or self.scores

    def rows(self, stage: Stage | Tap, sublayer: Sublayer = Sublayer.ATTENTION) -> Tensor | None:
        """A stage or a tap of the only text; None if the model does not show it."""
        if isinstance(stage, Stage):
            site = stage_sites(self.layer)[stage]
        else:
            site = Site(self.layer, stage, sublayer)
        site = replace(site, stack=self.name)
        return self[site].of(0) if site in self else None


def explain_layer(loaded: LoadedModel, text: StudioInput, layer: int, head: int) -> dict[str, Any]:
    """The numbers of one head and of its layer on the first tokens of a text, or on an image."""
    total, start, text = len(text), text.start, text.truncate(MAX_TOKENS)
    if len(text) > MAX_TOKENS:
        raise InputError(
            f"the image has {len(text)} patches, too many to show number by number",
            f"make it smaller: {MAX_TOKENS} or fewer",
        )
    stack = only_stack(loaded)
    record = LayerRecord(stack, layer)
    with eval_mode(loaded.model), torch.inference_mode():
        loaded.model.run_hidden(text.inputs, record)
        config, native = stack.config.layers[layer], not isinstance(stack, WrappedStack)
        before, after = record.rows(Tap.BEFORE), record.rows(Stage.ATTENTION_NORMED)
        # A module of transformers shows the residual stream around the whole layer.
        leaves = record.rows(Stage.FEEDFORWARD_NORMED)
        ids = text.inputs.ids
        view: dict[str, Any] = {
            "tokens": list(text.tokens),
            "ids": None if ids is None else ids.values.tolist(),
            "total": total,
            "start": min(start, len(text) - 1),
            "native": native,
            "layer": layer,
            "head": head,
            "layers": [_layer_kind(stack, index) for index in range(len(stack.layers))],
            "width": stack.config.width,
            "channels": min(MAX_CHANNELS, stack.config.width),
            "embedding": _embedding(loaded, text.inputs, record),
            "before": _numbers(before),
            "normed": None,
            "residual": config.residual,
            "norm": _norm_facts(config, Sublayer.ATTENTION) if native else NO_NORM,
            "written": _numbers(record.rows(Stage.ATTENTION_OUTPUT)),
            "after": _numbers(after) if native else None,
            "leaves": _numbers(after if leaves is None else leaves),
            "attention": None,
            "mixer": None,
            "joined": _joined(stack, layer, head, record),
            "feedforward": _feedforward(config, record),
            "final_norm": _name(stack.config.final_norm),
            "layout": None,
        }
        normed = None
        if before is not None and native and Sublayer.ATTENTION in config.branches:
            residual = cast(Layer, stack.layers[layer]).attention_residual
            normed = residual.read(before)
            view["normed"] = _numbers(normed)
        if config.attention is not None:
            attention = attention_at(stack, layer, Sublayer.ATTENTION)
            view["attention"] = _attention(attention, stack, record, normed, head)
            view["layout"] = _layout(attention, record, normed)
        elif config.mixer is not None:
            pattern = record.rows(Stage.WEIGHTS)
            view["mixer"] = {
                "name": type(config.mixer.inner).__name__,
                "heads": heads_in(config, Sublayer.ATTENTION),
                "weights": None if pattern is None else _numbers(pattern[head], None),
            }
        return view


def explain_batch(loaded: LoadedModel, texts: Iterable[str], layer: int) -> dict[str, Any]:
    """Up to three texts as one batch: padded, and end to end as the library lays them."""
    inputs = [loaded.read_text(text) for text in texts]
    if not 1 <= len(inputs) <= MAX_TEXTS:
        raise InputError(f"there are {len(inputs)} texts", f"give 1 to {MAX_TEXTS}, one per line")
    totals, inputs = [len(text) for text in inputs], [text.truncate(MAX_TOKENS) for text in inputs]
    sequences = [text.inputs.ids.values for text in inputs if text.inputs.ids is not None]
    batch = Ragged.from_list(sequences)
    lengths, stack = batch.lengths, only_stack(loaded)
    if _layer_kind(stack, layer)["kind"] == "none":
        # All heads of this layer are pruned, and it has no mask.
        layer = blocks_of(loaded.model)[0].layer
    mask = mask_in(stack.config.layers[layer], Sublayer.ATTENTION)
    with eval_mode(loaded.model), torch.inference_mode():
        together, *alone = (
            final_hidden(loaded.model, ModelInputs(ids=ids)).values.float()
            for ids in (batch, *(Ragged.from_list([ids]) for ids in sequences))
        )
    heads = sum(block.heads for block in blocks_of(loaded.model))
    return {
        "texts": [list(text.tokens) for text in inputs],
        "ids": [ids.tolist() for ids in sequences],
        "totals": totals,
        "lengths": list(lengths.each),
        "offsets": lengths.offsets.tolist(),
        "positions": lengths.positions.tolist(),
        "layer": layer,
        "mask": _mask_facts(mask),
        "visible": [_visible(mask.of_sequence(0), size) for size in lengths.each],
        "heads": heads,
        "cost": _padding_cost(lengths, heads),
        "difference": float((together - torch.cat(alone)).abs().max()),
        "largest": float(together.abs().max()),
    }


def only_stack(loaded: LoadedModel) -> Stack:
    """The layers of a model; the studio opens none that has two stacks."""
    [stack] = loaded.model.stacks().values()
    return stack


def _padding_cost(lengths: Lengths, heads: int) -> dict[str, int]:
    """Tokens, and entries of scores in all heads, of a padded batch and of a packed one."""
    padded, packed = len(lengths) * lengths.longest, lengths.total
    return {
        "padded_tokens": padded,
        "packed_tokens": packed,
        "padded_scores": heads * len(lengths) * lengths.longest**2,
        "packed_scores": heads * sum(length**2 for length in lengths.each),
    }


def _attention(
    attention: Attention,
    stack: Stack,
    record: LayerRecord,
    normed: Tensor | None,
    head: int,
) -> dict[str, Any]:
    config, tiled = attention.config, record.scores
    assert tiled is not None, "attention shows its queries and keys"
    owner = config.owners[head]
    view: dict[str, Any] = {
        "heads": config.heads,
        "key_heads": config.key_heads,
        "key_head": owner,
        "shared_by": [index for index, key in enumerate(config.owners) if key == owner],
        "size": config.size,
        "scale": tiled.request.scale,
        "scale_is_root": abs(tiled.request.scale * config.size**0.5 - 1) < 1e-6,
        "softcap": tiled.request.softcap,
        "sink": None if tiled.request.sink is None else float(tiled.request.sink[head]),
        "query_norm": _name(config.query_norm),
        "key_norm": _name(config.key_norm),
        "output_norm": _name(config.output_norm),
        "head_scale": None if attention.head_scale is None else float(attention.head_scale[head]),
        "mask": _mask_facts(tiled.request.mask.of_sequence(0)),
        "gates": _gates(attention, record, head, owner),
        "position": _position_facts(attention, record, head),
        # Where only the weights of a module are seen, nothing is known of its scores.
        "has_scores": getattr(attention, "has_scores", True),
        "query": _numbers(_head(record.rows(Stage.QUERY), head), None),
        "key": _numbers(_head(record.rows(Stage.KEY), owner), None),
        "value": _numbers(_head(record.rows(Stage.VALUE), owner), None),
        "plain_query": None,
        "plain_key": None,
        "mixed": _numbers(_head(record.rows(Tap.MIXED), head), None),
        "output": _numbers(_head(record.rows(Stage.HEAD_OUTPUTS), head), None),
    }
    if isinstance(config.position, Rotary) and normed is not None:
        # The same layer without positions: queries and keys before they are rotated.
        plain = LayerRecord(stack, record.layer)
        context = WatchContext(plain, stack.name, record.layer)
        x = Ragged(normed, tiled.request.queries)
        attention(x, encoding=None, context=context)
        view["plain_query"] = _numbers(_head(plain.rows(Stage.QUERY), head), None)
        view["plain_key"] = _numbers(_head(plain.rows(Stage.KEY), owner), None)
    return view | _scores(tiled, record, head)


def _scores(tiled: TiledScores, record: LayerRecord, head: int) -> dict[str, Any]:
    """The scores of a head from plain products to weights; hidden ones as if there were no mask."""
    request, length = tiled.request, tiled.request.queries.each[0]
    plain = replace(request, mask=Full(), scale=1.0, softcap=None, bias=None, groups=None)
    unmasked = replace(request, mask=Full(), groups=None)
    unbiased = replace(unmasked, bias=None)
    products, capped, scores = (
        reference.scores(tiled.query, tiled.key, variant).of(0)[head]
        for variant in (plain, unbiased, unmasked)
    )
    weights = record.rows(Stage.WEIGHTS)
    assert weights is not None, "the pattern is recorded"
    return {
        "products": _numbers(products, None),
        "bias": None if request.bias is None else _numbers(scores - capped, None),
        "scores": _numbers(scores, None),
        "visible": _visible(request.mask.of_sequence(0), length),
        "weights": _numbers(weights[head], None),
    }


def _embedding(loaded: LoadedModel, inputs: ModelInputs, record: LayerRecord) -> dict[str, Any]:
    """What enters the first layer; of our own models of text also what it is the sum of."""
    model = loaded.model
    view: dict[str, Any] = {
        "x": _numbers(record.rows(Stage.INPUT)),
        "token": None,
        "place": None,
        "position": "LearnedGrid" if model.reads_images else None,
        "scale": 1.0,
        "types": False,
        "norm": None,
        "projected": False,
    }
    if isinstance(model, WrappedModel) or not isinstance(model, TextModel) or inputs.ids is None:
        return view
    config, tables = model.config.embedding, model.embedding
    view |= {
        "token": _numbers(tables.scaled(tables.tokens(inputs.ids.values))),
        "position": _name(config.position),
        "scale": config.scale,
        "types": config.types > 0,
        "norm": _name(config.norm),
        "projected": config.projected,
    }
    positions = inputs.ids.lengths.positions
    match config.position:
        case Learned(offset=offset):
            assert tables.positions is not None
            view["place"] = _numbers(tables.positions(positions + offset))
        case Axial():
            assert tables.axial is not None
            view["place"] = _numbers(tables.axial(positions))
        case Sinusoidal() as sinusoidal:
            view["place"] = _numbers(sinusoidal.vectors(positions, config.size))
    return view


def _joined(stack: Stack, layer: int, head: int, record: LayerRecord) -> dict[str, Any] | None:
    """The outputs of all heads side by side, and how much each of them writes."""
    outputs = record.rows(Stage.HEAD_OUTPUTS)
    if outputs is None:
        return None
    weight = output_weight(stack, layer, Sublayer.ATTENTION).float()
    by_head = weight.unflatten(1, outputs.shape[1:])
    written = torch.einsum("nhd,chd->nhc", outputs.float(), by_head)
    return {
        "heads": _numbers(outputs, MAX_JOINED),
        "sizes": _numbers(written.norm(dim=-1), None),
        "own": _numbers(written[:, head]),
    }


def _feedforward(config: LayerConfig, record: LayerRecord) -> dict[str, Any] | None:
    branch = config.feedforward
    if branch is None:
        return None
    inner, part = branch.inner, Sublayer.FEEDFORWARD
    inside = record.rows(Stage.NEURONS)
    view: dict[str, Any] = {
        "kind": type(inner).__name__,
        "hidden": inner.hidden,
        "activation": "silu" if isinstance(inner, Experts) else inner.activation,
        "experts": None,
        "norm": _norm_facts(config, part),
        "before": _numbers(record.rows(Tap.BEFORE, part)),
        "inside": _numbers(inside),
        "active": None,
        "strongest": None,
        "written": _numbers(record.rows(Stage.FEEDFORWARD_OUTPUT)),
        "after": _numbers(record.rows(Stage.FEEDFORWARD_NORMED)),
    }
    if isinstance(inner, Experts):
        view["experts"] = {"count": inner.count, "top_k": inner.top_k, "shared": inner.shared}
    if inside is None:
        return view
    if isinstance(inner, MLP):
        view["active"] = _numbers((inside > 0).float().mean(-1), None)
    largest = inside.abs().topk(min(MAX_NEURONS, inside.shape[-1])).indices
    view["strongest"] = [
        [[neuron, _rounded(float(row[neuron]))] for neuron in neurons]
        for row, neurons in zip(inside, largest.tolist(), strict=True)
    ]
    return view


def _layout(attention: Attention, record: LayerRecord, normed: Tensor | None) -> dict[str, Any]:
    """Shapes and strides of queries and keys, as torch has them for a batch of one text."""
    config = attention.config
    query, key = record.rows(Stage.QUERY), record.rows(Stage.KEY)
    assert query is not None
    assert key is not None
    views: dict[str, Tensor] = {}
    if normed is not None:
        rows, joined = attention.our_rows, attention.project(normed)[None]
        first, second = joined.split(list(rows.values()), dim=-1)[:2]
        views["joined"] = joined
        query, key = (part.unflatten(-1, (-1, config.size)) for part in (first, second))
    else:
        query, key = query[None], key[None]
    views |= {"query": query, "key": key, "by_head": query.transpose(1, 2)}
    views["copied"] = views["by_head"].contiguous()
    if config.key_heads < config.heads and config.groups is None:
        shared = config.heads // config.key_heads
        views["shared"] = key.unsqueeze(3).expand(-1, -1, -1, shared, -1)
    return {
        "dtype": str(query.dtype).removeprefix("torch."),
        "bytes": query.element_size(),
        "parts": attention.our_rows if normed is not None else None,
        "first": _numbers(query[0, :, :, 0], None),
        "views": {
            name: {
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.storage_offset(),
                "contiguous": tensor.is_contiguous(),
            }
            for name, tensor in views.items()
        },
    }


def _layer_kind(stack: Stack, layer: int) -> dict[str, Any]:
    config = stack.config.layers[layer]
    kind = "mixer" if config.mixer is not None else "attention"
    heads = heads_in(config, Sublayer.ATTENTION)
    return {"kind": kind if heads or config.mixer is not None else "none", "heads": heads}


def _norm_facts(config: LayerConfig, sublayer: Sublayer) -> dict[str, str | None]:
    if sublayer not in config.branches:
        return NO_NORM
    placement: Placement = config.branches[sublayer].norm
    name = _name(placement.norm)
    return NO_NORM if name is None else {"name": name, "placement": type(placement).__name__}


def _mask_facts(mask: Mask) -> dict[str, Any]:
    before, after = (
        None if far == float("inf") else int(far) for far in (mask.reach.before, mask.reach.after)
    )
    band = mask.fills_reach
    return {"name": type(mask).__name__, "band": band, "before": before, "after": after}


def _position_facts(attention: Attention, record: LayerRecord, head: int) -> dict[str, Any]:
    position, size = attention.config.position, attention.config.size
    facts: dict[str, Any] = {"kind": _name(position)}
    if isinstance(position, Rotary):
        tiled = record.scores
        assert tiled is not None
        rotation = position.rotation(tiled.request.queries.positions, size, tiled.request.queries)
        angles = torch.atan2(rotation.sin, rotation.cos)[:, 0]
        facts |= {
            "theta": position.theta,
            "rotated": position.rotated_channels(size),
            "frequencies": _numbers(position.frequencies(size)[:MAX_PAIRS], None),
            "angles": _numbers(angles, MAX_PAIRS),
        }
    if isinstance(position, Alibi):
        facts["slope"] = position.slopes(attention.config.heads)[head]
    return facts


def _gates(
    attention: Attention, record: LayerRecord, head: int, key_head: int
) -> list[dict[str, Any]]:
    """The gates of the layer with their values for one head, or for the whole width at the end."""
    views = []
    for gate in attention.config.gates:
        opened = record.rows(GATE_TAPS[gate.at])
        if opened is None:
            continue
        own = key_head if gate.at in ("key", "value") else head
        values = opened if gate.at == "final" else opened[:, own if opened.shape[1] > 1 else 0]
        views.append(
            {
                "at": gate.at,
                "per": gate.per,
                "operation": gate.operation,
                "activation": gate.activation,
                "values": _numbers(values.flatten(1)),
                "mean": _numbers(values.flatten(1).float().mean(-1), None),
            }
        )
    return views


def _visible(mask: Mask, length: int) -> list[list[int]]:
    seen: list[list[int]] = (
        visible(mask, range(length), length, length, torch.device("cpu"))
        .int()
        .expand(length, length)
        .tolist()
    )
    return seen


def _head(values: Tensor | None, head: int) -> Tensor | None:
    return None if values is None else values[:, head]


def _name(part: object) -> str | None:
    return None if isinstance(part, NoNorm | NoPosition) else type(part).__name__


def _numbers(values: Tensor | None, channels: int | None = MAX_CHANNELS) -> Any:
    """Nested lists of rounded numbers, at most so many in the last axis."""
    if values is None:
        return None
    return _nested(values[..., :channels].tolist())


def _nested(value: Any) -> Any:
    return [_nested(item) for item in value] if isinstance(value, list) else _rounded(value)


def _rounded(value: float) -> float | None:
    """
    >>> _rounded(0.123456789), _rounded(float("inf"))
    (0.1234568, None)
    """
    return float(f"{value:.{DIGITS}g}") if abs(value) < float("inf") else None
