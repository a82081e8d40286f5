"""Where a logit comes from: what every head and layer adds to it, and what each layer would say."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Edits, Part, part_of
from manyheads.lens.inputs.metrics import weighed
from manyheads.lens.inputs.texts import read, run
from manyheads.lens.results.addresses import Block
from manyheads.lens.results.by_head import ByHead
from manyheads.lens.results.files import Result
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.layer import Layer, Residual
from manyheads.models.readout import ClassHead, LanguageHead, ReadoutLayer
from manyheads.models.vision import Vision
from manyheads.parts.constant import ConstantLayer
from manyheads.parts.norms import LayerNorm, Normalise, Post
from manyheads.ragged import Ragged
from manyheads.taps import Site, Sublayer, Tap

SUBLAYERS = (Sublayer.ATTENTION, Sublayer.CROSS, Sublayer.FEEDFORWARD)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DirectLogits(Result):
    """What each part of a model adds to a logit, text by text.

    `layers` holds for each sublayer and layer what it adds, its heads and its bias together;
    `bias` is what all biases add. Everything but `layers` sums to `logits`.
    """

    heads: ByHead
    by_head: Float[Tensor, "b heads"]
    layers: dict[tuple[Sublayer, int], Float[Tensor, " b"]]
    embedding: Float[Tensor, " b"]
    bias: Float[Tensor, " b"]
    logits: Float[Tensor, " b"]

    @property
    def total(self) -> Float[Tensor, " b"]:
        """The sum of all parts."""
        fed = [each for (sublayer, _), each in self.layers.items() if _feeds(sublayer)]
        return self.by_head.sum(1) + self.embedding + self.bias + sum(fed, torch.zeros(()))

    @property
    def completeness(self) -> float:
        """How far the parts are from adding up to the logit, at worst."""
        return float((self.total - self.logits).abs().max())

    def __str__(self) -> str:
        lines = [
            f"logit {float(self.logits.mean()):.4f} over {len(self.logits)} texts: "
            f"embedding {float(self.embedding.mean()):.4f}, biases {float(self.bias.mean()):.4f}, "
            f"off by {self.completeness:.1e} at worst"
        ]
        for address, mean in self.heads["logit"].ranked()[:5]:
            lines.append(f"  {address}  {mean:+.4f}")
        return "\n".join(lines)


def attribute_logits(
    model: Model,
    texts: Any,
    answer: Sequence[int] | None = None,
    distractor: Sequence[int] | None = None,
    *,
    at: Literal["last"] | Sequence[int] = "last",
) -> DirectLogits:
    """Direct logit attribution (arXiv 2211.00593): each head's write, norms frozen, on the logit.

    The logit is that of `answer`, one token or class per text (None: the one the model finds
    likeliest), minus that of `distractor` if there is one, at the last position or at one per text.
    Norms keep the divisors they had, so that what is left is linear and sums to the logit.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = attribute_logits(model, [[1, 2, 3], [4, 5]])
    >>> found.completeness < 1e-5
    True
    """
    part = part_of(model)
    readout = _linear_readout(model)
    given = read(model, texts)
    with resting(model), torch.no_grad():
        seen = Edits({}, _sites(part))
        run(model, given, seen)
        final = seen[Site(-1, Tap.FINAL, stack=part.stack_name)]
        rows = _rows(readout, final, at)
        table = None if isinstance(model, Vision) else model.table
        towards, bias, logits = _direction(readout, table, final, rows, answer, distractor)
        back = _Back(part, seen, rows, towards)
        back.walk()
    return back.result(bias, logits)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The tokens that are read for each text, with their weights in what is read."""

    places: Int[Tensor, " m"]
    owners: Int[Tensor, " m"]
    weights: Float[Tensor, " m"]
    texts: int

    def by_text(self, values: Float[Tensor, "m *rest"]) -> Float[Tensor, "b *rest"]:
        summed = values.new_zeros(self.texts, *values.shape[1:])
        return summed.index_add(0, self.owners, values)


class _Back:
    """Carries a direction from the logit down to the embeddings; what meets it on the way adds."""

    def __init__(self, part: Part, seen: Edits, rows: _Rows, towards: Float[Tensor, "b c"]) -> None:
        self.part, self.seen, self.rows = part, seen, rows
        self.towards = towards[rows.owners] * rows.weights[:, None]
        self.bias = towards.new_zeros(rows.texts)
        self.heads: dict[Block, Tensor] = {}
        self.layers: dict[tuple[Sublayer, int], Tensor] = {}

    def walk(self) -> None:
        stack = self.part.stack
        last = len(stack.layers) - 1
        if last >= 0:
            self._pull(stack.final_norm, self._value(*self._end(last)))
        for layer in range(last, -1, -1):
            module = cast(Layer, stack.layers[layer])
            for sublayer in reversed(SUBLAYERS):
                inner = _inner(module, sublayer)
                if inner is not None:
                    residual = getattr(module, f"{sublayer.value}_residual")
                    self._sublayer(layer, sublayer, inner, residual)

    def result(self, bias: Float[Tensor, " b"], logits: Float[Tensor, " b"]) -> DirectLogits:
        blocks = tuple(sorted(self.heads, key=lambda each: (each.layer, each.sublayer.value)))
        by_head = torch.cat([self.heads[block] for block in blocks], dim=1).cpu()
        entered = self._value(-1, Tap.EMBEDDINGS, Sublayer.ATTENTION)
        means, errors = weighed(by_head, torch.ones(len(by_head)))
        return DirectLogits(
            heads=ByHead(
                kind="direct logit attribution",
                blocks=blocks,
                means={"logit": means.numpy()},
                errors={"logit": errors.numpy()},
                facts={"texts": len(by_head), "logit": float(logits.mean())},
            ),
            by_head=by_head,
            layers={key: each.cpu() for key, each in self.layers.items()},
            embedding=self._along(entered, self.towards).cpu(),
            bias=(self.bias + bias).cpu(),
            logits=logits.cpu(),
        )

    def _end(self, layer: int) -> tuple[int, Tap, Sublayer]:
        module = self.part.stack.layers[layer]
        there = [each for each in SUBLAYERS if _inner(module, each) is not None]
        return layer, Tap.AFTER, there[-1]

    def _value(self, layer: int, tap: Tap, sublayer: Sublayer) -> Tensor:
        site = Site(layer, tap, sublayer, self.part.stack_name)
        return self.seen[site].values[self.rows.places].double()

    def _along(self, values: Float[Tensor, "m c"], towards: Float[Tensor, "m c"]) -> Tensor:
        return self.rows.by_text((values * towards).sum(-1))

    def _sublayer(
        self, layer: int, sublayer: Sublayer, inner: nn.Module, residual: Residual
    ) -> None:
        written = self._value(layer, Tap.OUTPUT, sublayer)
        if isinstance(residual.placement, Post):
            self._pull(residual.norm, self._value(layer, Tap.BEFORE, sublayer) + written)
        self.layers[sublayer, layer] = self._along(written, self.towards)
        if isinstance(inner, Attention):
            self._attention(layer, sublayer, inner, residual)
        elif isinstance(inner, ConstantLayer):
            self.bias = self.bias + self.layers[sublayer, layer]

    def _attention(
        self, layer: int, sublayer: Sublayer, attention: Attention, residual: Residual
    ) -> None:
        """Splits what an attention adds among its heads and its bias."""
        spoken = self._value(layer, Tap.HEAD_OUTPUT, sublayer)
        weight = attention.output.weight.double()
        bias = attention.output.bias
        towards, stream = self.towards, self.towards
        gates = [gate for gate in attention.config.gates if gate.at == "final"]
        opened = self._value(layer, Tap.GATE_FINAL, sublayer) if gates else None
        if residual.second_norm is not None:
            raw = spoken.flatten(1) @ weight.T + (0 if bias is None else bias.double())
            if opened is not None:
                cut = raw.unflatten(-1, attention.config.gate_shape("final"))
                raw = gates[0].apply(cut, opened).flatten(1)
            self._pull(residual.second_norm, raw)
            towards, self.towards = self.towards, stream
        if opened is not None:
            spread = opened.expand(*_sliced(towards, attention).shape).flatten(1)
            if gates[0].how == "times":
                towards = towards * spread
            else:
                self.bias = self.bias + self._along(spread, towards)
        if bias is not None:
            self.bias = self.bias + self._along(bias.double().expand_as(towards), towards)
        met = (towards @ weight).unflatten(-1, spoken.shape[1:]) * spoken
        block = Block(layer, spoken.shape[1], self.part.stack_name, sublayer)
        self.heads[block] = self.rows.by_text(met.sum(-1))

    def _pull(self, norm: nn.Module, at: Float[Tensor, "m c"]) -> None:
        """The direction before a norm whose divisor stays as it was; its bias is set aside."""
        if not isinstance(norm, Normalise):
            return
        if norm.bias is not None:
            bias = norm.bias.double().expand_as(self.towards)
            self.bias = self.bias + self._along(bias, self.towards)
        weight = norm.weight.double() + (1 if norm.config.centred else 0)
        towards = self.towards * weight
        if isinstance(norm.config, LayerNorm):
            at = at - at.mean(-1, keepdim=True)
            towards = towards - towards.mean(-1, keepdim=True)
        self.towards = towards / (at.square().mean(-1, keepdim=True) + norm.config.eps).sqrt()


def _inner(layer: Any, sublayer: Sublayer) -> Any:
    """What stands at a sublayer of a layer, or of its config: itself, or what is left of it."""
    inner = getattr(layer, sublayer.value)
    return getattr(layer, f"{sublayer.value}_rest", None) if inner is None else inner


def _sliced(towards: Float[Tensor, "m c"], attention: Attention) -> Float[Tensor, "m h e"]:
    return towards.unflatten(-1, attention.config.gate_shape("final"))


def _feeds(sublayer: Sublayer) -> bool:
    return sublayer is Sublayer.FEEDFORWARD


def _sites(part: Part) -> list[Site]:
    name = part.stack_name
    found = [Site(-1, tap, stack=name) for tap in (Tap.EMBEDDINGS, Tap.FINAL)]
    for layer, config in enumerate(part.stack.config.layers):
        for sublayer in SUBLAYERS:
            branch = _inner(config, sublayer)
            if branch is None:
                continue
            taps = [Tap.BEFORE, Tap.OUTPUT, Tap.AFTER]
            if isinstance(branch.inner, AttentionConfig):
                taps.append(Tap.HEAD_OUTPUT)
                taps += [Tap.GATE_FINAL for gate in branch.inner.gates if gate.at == "final"]
            found += [Site(layer, tap, sublayer, name) for tap in taps]
    return found


def _linear_readout(model: Model) -> ReadoutLayer:
    readout = model.readout
    if readout is None:
        raise InputError(
            f"this {type(model).__name__} has no readout and no logits", "use one that has"
        )
    if readout.config.transform is not None:
        raise InputError(
            "this readout bends what it reads before it scores, so that no logit is a sum",
            "use ablation, patching or integrated gradients",
        )
    return readout


def _rows(readout: ReadoutLayer, final: Ragged, at: Literal["last"] | Sequence[int]) -> _Rows:
    lengths = final.lengths
    texts = torch.arange(len(final), device=final.device)
    starts, ends = lengths.offsets[:-1].long(), lengths.offsets[1:].long() - 1
    ones = torch.ones(len(final), dtype=torch.float64, device=final.device)
    if isinstance(readout.config, ClassHead):
        if readout.config.pool == "mean":
            owners = lengths.sequence_of_token
            every = torch.arange(lengths.total, device=final.device)
            return _Rows(every, owners, 1 / (ends - starts + 1)[owners].double(), len(final))
        return _Rows(starts if readout.config.pool == "first" else ends, texts, ones, len(final))
    if isinstance(at, str):
        return _Rows(ends, texts, ones, len(final))
    if len(at) != len(final):
        raise InputError(f"{len(at)} positions were given for {len(final)} texts", "give one each")
    for text, (position, length) in enumerate(zip(at, lengths.each, strict=True)):
        if not 0 <= position < length:
            raise InputError(f"text {text} has no position {position}", f"use 0 to {length - 1}")
    return _Rows(starts + torch.tensor(list(at), device=final.device), texts, ones, len(final))


def _direction(
    readout: ReadoutLayer,
    table: Float[Tensor, "v c"] | None,
    final: Ragged,
    rows: _Rows,
    answer: Sequence[int] | None,
    distractor: Sequence[int] | None,
) -> tuple[Float[Tensor, "b c"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """What the last hidden state is multiplied by, the readout's bias, and the logit itself."""
    hidden = rows.by_text(final.values[rows.places].double() * rows.weights[:, None])
    vectors = readout.vectors(table).double()
    scale = readout.config.scale if isinstance(readout.config, LanguageHead) else 1.0
    biases = vectors.new_zeros(len(vectors)) if readout.bias is None else readout.bias.double()
    if answer is None:
        answer = (hidden @ vectors.T * scale + biases).argmax(-1).tolist()
    towards, bias = vectors.new_zeros(hidden.shape), vectors.new_zeros(len(hidden))
    for sign, answers in ((1, answer), (-1, distractor)):
        if answers is None:
            continue
        if len(answers) != rows.texts:
            raise InputError(
                f"{len(answers)} answers were given for {rows.texts} texts", "give one each"
            )
        chosen = torch.tensor(list(answers), device=vectors.device)
        towards = towards + sign * scale * vectors[chosen]
        bias = bias + sign * biases[chosen]
    return towards, bias, (hidden * towards).sum(-1) + bias
