"""Where a logit comes from: what every head and layer adds to it, and what each layer would say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.bridge import automatic, structure, wrapped_parts
from manyheads.errors import InputError
from manyheads.formatting import pluralise
from manyheads.lens.attribution.stream_parts import frozen_norm
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.results import addresses, files, tables
from manyheads.mixers.mixer import Mixer
from manyheads.models.build import Model, eval_mode
from manyheads.models.layer import Residual
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import ClassHead, ReadoutLayer
from manyheads.parts import feedforward, norms
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Site, Sublayer, Tap

SUBLAYERS = (Sublayer.ATTENTION, Sublayer.CROSS, Sublayer.FEEDFORWARD)
# The position in each text that a prediction is read from.
At = Literal["last"] | Sequence[int]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DirectLogits(files.Result):
    """What each part of a model adds to a logit, per text.

    `layers` has the contribution of each sublayer, heads and bias together; `bias` that of all
    biases. The logit is the sum of `by_head`, the feed-forwards and mixers in `layers`,
    `embedding` and `bias`.
    """

    heads: tables.ByHead
    by_head: Float[Tensor, "b heads"]
    layers: dict[tuple[Sublayer, int], Float[Tensor, " b"]]
    embedding: Float[Tensor, " b"]
    bias: Float[Tensor, " b"]
    logits: Float[Tensor, " b"]

    @property
    def total(self) -> Float[Tensor, " b"]:
        """The sum of all parts."""
        headless = (Sublayer.FEEDFORWARD, Sublayer.MIXER)
        parts = [by_text for (part, _), by_text in self.layers.items() if part in headless]
        return self.by_head.sum(1) + self.embedding + self.bias + sum(parts, torch.zeros(()))

    @property
    def completeness(self) -> float:
        """The largest difference between the sum of the parts and the logit."""
        return float((self.total - self.logits).abs().max())

    def __str__(self) -> str:
        heads = (f"  {address}  {mean:+.4f}" for address, mean in self.heads["logit"].ranked()[:5])
        first = (
            f"logit {float(self.logits.mean()):.4f} over {pluralise(len(self.logits), 'text')}: "
            f"embedding {float(self.embedding.mean()):.4f}, biases {float(self.bias.mean()):.4f}, "
            f"off by at most {self.completeness:.1e}"
        )
        return "\n".join((first, *heads))

    __repr__ = __str__


@automatic.wrapping_models
def attribute_logits(
    model: Model,
    texts: Inputs,
    answer: Sequence[int] | None = None,
    distractor: Sequence[int] | None = None,
    *,
    at: At = "last",
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
) -> DirectLogits:
    """Direct logit attribution (arXiv 2211.00593): each head's write, norms frozen, on the logit.

    The logit is that of `answer`, one token or class per text (None: the most likely one), minus
    that of `distractor` if there is one, at the last position or at one per text. Norms keep the
    divisors they had, so that everything is linear and sums to the logit (before a cap, as in
    Gemma 2). `edits` change activations of the run, such as the outputs of ablated heads. In a
    wrapped model the feed-forward of a layer is all that it adds besides its attentions.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> logits = attribute_logits(model, [[1, 2, 3], [4, 5]])
    >>> logits.completeness < 1e-5
    True
    """
    walk = walk_back(model, read_inputs(model, texts), answer, distractor, at=at, edits=edits)
    return walk.result()


def walk_back(
    model: Model,
    inputs: ModelInputs,
    answer: Sequence[int] | None,
    distractor: Sequence[int] | None,
    *,
    at: At,
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
    recorder: Callable[[list[Site]], cached_run.ActivationEditor] | None = None,
) -> "BackwardWalk":
    """The walk of `attribute_logits`; a `recorder` makes the watcher of the run from its sites."""
    scope = cached_run.head_scope(model)
    readout = _linear_readout(model)
    check_stream(scope)
    with eval_mode(model), torch.no_grad():
        sites = _sites(scope)
        record = (
            cached_run.ActivationEditor(edits or {}, sites) if recorder is None else recorder(sites)
        )
        model.run_inputs(inputs, record)
        final = record[Site(-1, Tap.FINAL, stack=scope.stack_name)]
        rows = _rows(readout, final, at)
        towards, bias, logits = _direction(readout, model.table, final, rows, answer, distractor)
        walk = (BackwardWalk if model.native else _WrappedWalk)(scope, record, rows, towards)
        walk.bias, walk.logits = bias, logits
        walk.run()
    return walk


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The tokens that the readout reads in each text, with their weights."""

    places: Int[Tensor, " m"]
    owners: Int[Tensor, " m"]
    weights: Float[Tensor, " m"]
    texts: int

    def by_text(self, values: Float[Tensor, "m *rest"]) -> Float[Tensor, "b *rest"]:
        summed = values.new_zeros(self.texts, *values.shape[1:])
        return summed.index_add(0, self.owners, values)


class BackwardWalk:
    """Carries the logit's direction down to the embeddings, summing what each part adds."""

    def __init__(
        self,
        scope: cached_run.HeadScope,
        record: cached_run.ActivationEditor,
        rows: _Rows,
        towards: Float[Tensor, "b c"],
    ) -> None:
        self.scope, self.record, self.rows = scope, record, rows
        self.towards = towards[rows.owners] * rows.weights[:, None]
        self.bias = self.logits = towards.new_zeros(rows.texts)
        self.heads: dict[addresses.Block, Float[Tensor, "b h"]] = {}
        # What the output of each head is multiplied by, for each row.
        self.directions: dict[addresses.Block, Float[Tensor, "m h d"]] = {}
        self.layers: dict[tuple[Sublayer, int], Tensor] = {}

    def run(self) -> None:
        stack = self.scope.stack
        last = len(stack.layers) - 1
        if last >= 0:
            branches = [part for part in SUBLAYERS if _inner(stack.layers[last], part) is not None]
            self._pull(stack.final_norm, self._value(last, Tap.AFTER, branches[-1]))
        for layer in range(last, -1, -1):
            module = stack.layers[layer]
            for sublayer in reversed(SUBLAYERS):
                inner = _inner(module, sublayer)
                if inner is not None:
                    residual = getattr(module, f"{sublayer.value}_residual")
                    self._sublayer(layer, sublayer, inner, residual)

    def result(self) -> DirectLogits:
        blocks = tuple(sorted(self.heads, key=lambda block: (block.layer, block.sublayer.value)))
        by_head = torch.cat([self.heads[block] for block in blocks], dim=1).cpu()
        entered = self._value(-1, Tap.EMBEDDINGS, Sublayer.ATTENTION)
        means, errors = metrics.weighted_mean(by_head, torch.ones(len(by_head)))
        return DirectLogits(
            heads=tables.ByHead(
                kind="direct logit attribution",
                blocks=blocks,
                means={"logit": means.numpy()},
                errors={"logit": errors.numpy()},
                metadata={"texts": len(by_head), "logit": float(self.logits.mean())},
            ),
            by_head=by_head,
            layers={key: by_text.cpu() for key, by_text in self.layers.items()},
            embedding=self._along(entered, self.towards).cpu(),
            bias=self.bias.cpu(),
            logits=self.logits.cpu(),
        )

    def _value(self, layer: int, tap: Tap, sublayer: Sublayer) -> Tensor:
        site = Site(layer, tap, sublayer, self.scope.stack_name)
        return self.record[site].values[self.rows.places].double()

    def _along(self, values: Float[Tensor, "m c"], towards: Float[Tensor, "m c"]) -> Tensor:
        return self.rows.by_text((values * towards).sum(-1))

    def _add_bias(self, bias: Any, towards: Float[Tensor, "m c"]) -> None:
        if isinstance(bias, Tensor):
            self.bias = self.bias + self._along(bias.double().expand_as(towards), towards)

    def _add_heads(
        self,
        layer: int,
        sublayer: Sublayer,
        outputs: Float[Tensor, "m h d"],
        weight: Float[Tensor, "c hd"],
        towards: Float[Tensor, "m c"],
    ) -> None:
        directions = (towards @ weight).unflatten(-1, outputs.shape[1:])
        block = addresses.Block(layer, outputs.shape[1], self.scope.stack_name, sublayer)
        self.directions[block] = directions
        self.heads[block] = self.rows.by_text((directions * outputs).sum(-1))

    def _sublayer(
        self, layer: int, sublayer: Sublayer, inner: nn.Module, residual: Residual
    ) -> None:
        written = self._value(layer, Tap.OUTPUT, sublayer)
        if isinstance(residual.placement, norms.PostNorm):
            self._pull(residual.norm, self._value(layer, Tap.BEFORE, sublayer) + written)
        splits = isinstance(inner, Attention) or self.scope.heads_of(layer) > 0
        place = sublayer if splits or not isinstance(inner, Mixer) else Sublayer.MIXER
        self.layers[place, layer] = self._along(written, self.towards)
        if isinstance(inner, Attention | Mixer) and place is sublayer:
            self._heads(layer, sublayer, inner, residual)
        elif isinstance(inner, feedforward.ConstantLayer):
            self.bias = self.bias + self.layers[sublayer, layer]

    def _heads(
        self, layer: int, sublayer: Sublayer, attention: Attention | Mixer, residual: Residual
    ) -> None:
        """Split what an attention or mixer adds among its heads and its bias."""
        outputs = self._value(layer, Tap.HEAD_OUTPUT, sublayer)
        weight = attention.output.weight.double()
        bias = attention.output.bias
        towards, stream = self.towards, self.towards
        every = attention.config.gates if isinstance(attention, Attention) else ()
        gates = [gate for gate in every if gate.at == "final"]
        opened = self._value(layer, Tap.GATE_FINAL, sublayer) if gates else None
        if residual.second_norm is not None:
            raw = outputs.flatten(1) @ weight.T + (0 if bias is None else bias.double())
            if opened is not None:
                cut = raw.unflatten(-1, attention.config.gate_shape("final"))
                raw = gates[0].apply(cut, opened).flatten(1)
            self._pull(residual.second_norm, raw)
            towards, self.towards = self.towards, stream
        if opened is not None:
            sliced = towards.unflatten(-1, attention.config.gate_shape("final"))
            spread = opened.expand_as(sliced).flatten(1)
            if gates[0].operation == "multiply":
                towards = towards * spread
            else:
                self.bias = self.bias + self._along(spread, towards)
        self._add_bias(bias, towards)
        self._add_heads(layer, sublayer, outputs, weight, towards)

    def _pull(self, norm: nn.Module, at: Float[Tensor, "m c"]) -> None:
        """Move the direction in front of a norm with a frozen divisor, and set its bias aside."""
        if isinstance(norm, norms.ChannelScale):
            self.towards = self.towards * norm.weight.double()
        elif not isinstance(norm, nn.Identity):
            frozen = frozen_norm(norm, at)
            self._add_bias(frozen.bias, self.towards)
            self.towards = frozen.pull(self.towards)


class _WrappedWalk(BackwardWalk):
    """The same through layers of `transformers`: what they add is what they leave behind."""

    def run(self) -> None:
        stack = cast(wrapped_parts.WrappedStack, self.scope.stack)
        for layer in range(stack.facts.depth - 1, -1, -1):
            crosses = stack.layers[layer].cross is not None
            last = Sublayer.CROSS if crosses else Sublayer.ATTENTION
            after = self._value(layer, Tap.AFTER, last)
            if layer == stack.facts.depth - 1:
                self._pull(stack.final_norm, after)
            rest = after - self._value(layer, Tap.BEFORE, Sublayer.ATTENTION)
            for facts, index in stack.facts.attentions:
                if index == layer:
                    rest = rest - self._attention_of(layer, facts)
            self.layers[Sublayer.FEEDFORWARD, layer] = self._along(rest, self.towards)

    def _attention_of(self, layer: int, facts: structure.ProbedAttention) -> Float[Tensor, "m c"]:
        """Split what an attention adds among its heads and its bias, and return it."""
        sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
        outputs = self._value(layer, Tap.HEAD_OUTPUT, sublayer)
        assert facts.write is not None
        assert facts.projection is not None
        weight, bias = structure.linear_weight(facts.projection).double(), facts.projection.bias
        written = outputs.flatten(1) @ weight.T + (bias.double() if isinstance(bias, Tensor) else 0)
        towards = self.towards * facts.write.factor
        if facts.write.norm is not None:
            frozen = frozen_norm(facts.write.norm, written)
            written = frozen.apply(written)
            self._add_bias(frozen.bias, towards)
            towards = frozen.pull(towards)
        written = written * facts.write.factor
        self.layers[sublayer, layer] = self._along(written, self.towards)
        self._add_bias(bias, towards)
        self._add_heads(layer, sublayer, outputs, weight, towards)
        return written


def check_stream(scope: cached_run.HeadScope) -> None:
    """Refuse a model whose heads do not simply add to its residual stream."""
    if scope.model.native:
        addresses.check_one_stream(scope.stack)
        if getattr(scope.stack.config, "halting", None) is not None:
            raise InputError(
                "tokens of this model stop on their own, so that its logits are means over layers",
                "use a model without halting",
            )
        for index, layer in enumerate(scope.stack.config.layers):
            if layer.convolution is not None:
                raise InputError(
                    f"layer {index} has a convolution, which adds more than its sublayers do",
                    "use ablation, patching or integrated gradients",
                )
        return
    stack = cast(wrapped_parts.WrappedStack, scope.stack)
    assert stack.final_norm is not None
    for facts, _ in stack.facts.attentions:
        if facts.write is None or stack.facts.slots > 1:
            raise InputError(
                f"{facts.path} of this model does not simply add to the residual stream, so that "
                "its logits are no sums of what heads write",
                "use ablation, patching or integrated gradients",
            )


def _inner(layer: Any, sublayer: Sublayer) -> Any:
    """The sublayer of a layer, or the constant that pruning left of it."""
    inner = getattr(layer, sublayer.value)
    if inner is None and sublayer is Sublayer.ATTENTION:
        inner = getattr(layer, Sublayer.MIXER.value, None)
    return getattr(layer, f"{sublayer.value}_rest", None) if inner is None else inner


def _sites(scope: cached_run.HeadScope) -> list[Site]:
    name = scope.stack_name
    sites = [Site(-1, tap, stack=name) for tap in (Tap.EMBEDDINGS, Tap.FINAL)]
    for layer, config in enumerate(scope.stack.config.layers):
        for sublayer, branch in config.branches.items():
            taps = [Tap.BEFORE, Tap.OUTPUT, Tap.AFTER]
            if sublayer is not Sublayer.FEEDFORWARD and addresses.heads_in(config, sublayer):
                taps.append(Tap.HEAD_OUTPUT)
            if isinstance(branch.inner, AttentionConfig):
                taps += [Tap.GATE_FINAL for gate in branch.inner.gates if gate.at == "final"]
            sites += [Site(layer, tap, sublayer, name) for tap in taps]
    return sites


def _linear_readout(model: Model) -> ReadoutLayer:
    readout = model.readout
    if readout is None:
        raise InputError(
            f"this {type(model).__name__} has no readout and thus no logits",
            "use a model with a language or class head",
        )
    problem = ""
    if readout.config.transform is not None:
        problem = "the readout of this model is not linear, so that its logits are no sums"
    if getattr(readout.config, "pool", None) == "first_and_mean":
        problem = "this model reads its classes from the first token and a mean of the others"
    if problem:
        raise InputError(problem, "use ablation, patching or integrated gradients")
    return readout


def _rows(readout: ReadoutLayer, final: Ragged, at: At) -> _Rows:
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
    return _Rows(token_indices(lengths, at), texts, ones, len(final))


def _direction(
    readout: ReadoutLayer,
    table: Float[Tensor, "v c"] | None,
    final: Ragged,
    rows: _Rows,
    answer: Sequence[int] | None,
    distractor: Sequence[int] | None,
) -> tuple[Float[Tensor, "b c"], Float[Tensor, " b"], Float[Tensor, " b"]]:
    """The vector that the last hidden state is multiplied by, the readout's bias, and the logit."""
    hidden = rows.by_text(final.values[rows.places].double() * rows.weights[:, None])
    vectors = readout.vectors(table).double()
    scale = readout.factor
    biases = vectors.new_zeros(len(vectors)) if readout.bias is None else readout.bias.double()
    if answer is None:
        answer = (hidden @ vectors.T * scale + biases).argmax(-1).tolist()
    towards, bias = vectors.new_zeros(hidden.shape), vectors.new_zeros(len(hidden))
    for sign, answers in ((1, answer), (-1, distractor)):
        if answers is not None:
            chosen = _answer_ids(answers, hidden)
            towards = towards + sign * scale * vectors[chosen]
            bias = bias + sign * biases[chosen]
    return towards, bias, (hidden * towards).sum(-1) + bias


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LogitLens(files.Result):
    """The most likely tokens of each text before the first layer and after each layer.

    `answer_log_probabilities` and `answer_ranks` are those of the `answer` tokens, if there are
    any; rank 0 is the most likely token.
    """

    answers: Int[Tensor, "steps b k"]
    log_probabilities: Float[Tensor, "steps b k"]
    answer_log_probabilities: Float[Tensor, "steps b"] | None = None
    answer_ranks: Int[Tensor, "steps b"] | None = None

    def settled(self) -> Int[Tensor, " b"]:
        """The first step from which the most likely token stays the final one."""
        first = self.answers[..., 0]
        agrees = (first == first[-1]).flip(0).long().cumprod(0)
        return first.shape[0] - agrees.sum(0)

    def __str__(self) -> str:
        steps, texts, _ = self.answers.shape
        return (
            f"logit lens of {pluralise(texts, 'text')}: the answer is final after "
            f"{float(self.settled().float().mean()):.1f} of {steps - 1} layers"
        )

    __repr__ = __str__


@automatic.wrapping_models
def logit_lens(
    model: Model,
    texts: Inputs,
    answer: Sequence[int] | None = None,
    *,
    at: At = "last",
    top_k: int = 5,
    edits: Mapping[Site, cached_run.EditFunction] | None = None,
) -> LogitLens:
    """Apply the final norm and the readout to the residual stream after every layer.

    The method is from nostalgebraist, "interpreting GPT: the logit lens" (2020). `edits` change
    activations of the run.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> logit_lens(model, [[1, 2, 3], [4, 5]], top_k=3).answers.shape
    torch.Size([3, 2, 3])
    """
    scope = cached_run.head_scope(model, headless=True)
    if model.readout is None or isinstance(model.readout.config, ClassHead):
        raise InputError(
            f"this {type(model).__name__} has no language head", "use a model that has one"
        )
    addresses.check_one_stream(scope.stack)
    inputs, stack = read_inputs(model, texts), scope.stack
    with eval_mode(model), torch.no_grad():
        sites = [cached_run.layer_input_site(stack, layer) for layer in range(len(stack.layers))]
        final = Site(-1, Tap.FINAL, stack=scope.stack_name)
        record = cached_run.ActivationEditor(edits or {}, [*sites, final])
        model.run_inputs(inputs, record)
        indices = token_indices(record[final].lengths, at)
        rows = [stack.final_norm(record[site].values[indices]) for site in sites]
        rows.append(record[final].values[indices])
        logits = model.readout.logits(torch.cat(rows), model.table).float()
        scores = logits.log_softmax(-1).unflatten(0, (len(rows), -1))
    top = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    lens = LogitLens(answers=top.indices, log_probabilities=top.values)
    if answer is None:
        return lens
    tokens = _answer_ids(answer, scores[0]).expand(len(rows), -1).unsqueeze(-1)
    own = scores.gather(-1, tokens)
    ranks = (scores > own).sum(-1)
    return replace(lens, answer_log_probabilities=own.squeeze(-1), answer_ranks=ranks)


def _answer_ids(answers: Sequence[int], texts: Float[Tensor, "b *rest"]) -> Int[Tensor, " b"]:
    if len(answers) != len(texts):
        raise InputError(f"got {len(answers)} answers for {len(texts)} texts", "give one per text")
    return torch.tensor(list(answers), device=texts.device)


def token_indices(lengths: Lengths, at: At) -> Int[Tensor, " b"]:
    """The index of one token per text."""
    if isinstance(at, str):
        return lengths.offsets[1:].long() - 1
    if len(at) != len(lengths):
        raise InputError(f"got {len(at)} positions for {len(lengths)} texts", "give one per text")
    for text, (position, length) in enumerate(zip(at, lengths.each, strict=True)):
        if not 0 <= position < length:
            raise InputError(f"text {text} has no position {position}", f"use 0 to {length - 1}")
    return lengths.offsets[:-1].long() + torch.tensor(list(at), device=lengths.offsets.device)
