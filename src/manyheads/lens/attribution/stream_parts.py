"""The residual stream of some tokens as a sum of what heads, MLPs and embeddings wrote to it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge import residual_writes, structure, wrapped_model, wrapped_parts
from manyheads.errors import InputError
from manyheads.lens.inputs import cached_run
from manyheads.lens.results import addresses
from manyheads.mixers.mixer import Mixer
from manyheads.models.embedding import TokenEmbedding
from manyheads.models.model_interface import ModelInputs
from manyheads.parts import feedforward, norms
from manyheads.taps import Site, Sublayer, Tap

# The writer of everything that does not depend on the text: biases of norms and projections.
BIASES = "biases"
ELSEWHERE = "use lens.cut, patching or ablation"


@dataclass(frozen=True, slots=True, eq=False)
class StreamParts:
    """Vectors of m tokens as sums over writers, in float64; the first writer is `BIASES`.

    Linear maps apply to each part, and what they add is a bias. A norm is linear once its
    divisor, which is that of the sum, is frozen.
    """

    names: tuple[str, ...]
    values: Float[Tensor, "m w c"]

    @classmethod
    def of(cls, names: Sequence[str], values: Float[Tensor, "m w c"]) -> "StreamParts":
        values = values.double()
        return cls((BIASES, *names), torch.cat((torch.zeros_like(values[:, :1]), values), 1))

    @classmethod
    def of_biases(cls, values: Float[Tensor, "m c"]) -> "StreamParts":
        return cls((BIASES,), values.double().unsqueeze(1))

    @property
    def total(self) -> Float[Tensor, "m c"]:
        return self.values.sum(1)

    @classmethod
    def summed(cls, writes: Sequence["StreamParts"]) -> "StreamParts":
        """The sum of several, each with writers of its own."""
        biases = torch.stack([write.values[:, 0] for write in writes]).sum(0)
        names = tuple(name for write in writes for name in write.names[1:])
        values = [biases[:, None], *(write.values[:, 1:] for write in writes)]
        return cls((BIASES, *names), torch.cat(values, 1))

    def with_bias(self, bias: Tensor | None) -> "StreamParts":
        if bias is None:
            return self
        values = self.values.clone()
        values[:, 0] += bias.detach().double()
        return replace(self, values=values)

    def scaled(self, factor: Float[Tensor, "m_or_1 c"] | float) -> "StreamParts":
        factor = factor.double().unsqueeze(1) if isinstance(factor, Tensor) else factor
        return replace(self, values=self.values * factor)

    def projected(self, weight: Float[Tensor, "rows c"], bias: Tensor | None) -> "StreamParts":
        projected = replace(self, values=self.values @ weight.detach().double().T)
        return projected.with_bias(bias)

    def normed(self, norm: nn.Module | None) -> "StreamParts":
        if isinstance(norm, norms.ChannelScale):
            return self.scaled(norm.weight.detach()[None])
        if norm is None or isinstance(norm, nn.Identity):
            return self
        frozen = frozen_norm(norm, self.total)
        values = self.values
        values = values - values.mean(-1, keepdim=True) if frozen.centered else values
        return replace(self, values=values * (frozen.gain / frozen.divisor)[:, None]).with_bias(
            frozen.bias
        )


def frozen_norm(norm: nn.Module, at: Float[Tensor, "m c"]) -> residual_writes.FrozenNorm:
    """A norm of ours or of `transformers` with the divisors that it has for `at`."""
    if not isinstance(norm, norms.Normalize):
        return residual_writes.FrozenNorm.of(norm, at)
    weight, centered = norm.weight.detach().double(), isinstance(norm.config, norms.LayerNorm)
    x = at - at.mean(-1, keepdim=True) if centered else at
    divisor = (x.square().mean(-1, keepdim=True) + norm.config.eps).sqrt()
    bias = None if norm.bias is None else norm.bias.detach().double()
    gain = weight + 1 if norm.config.centered else weight
    return residual_writes.FrozenNorm(gain, divisor, centered, bias)


@dataclass(frozen=True, slots=True, eq=False)
class StreamReader:
    """Divides the stream that an attention of a model of ours reads among its writers."""

    scope: cached_run.HeadScope
    inputs: ModelInputs
    layer: int

    def sites(self) -> Iterator[Site]:
        """What has to be recorded."""
        yield Site(-1, Tap.EMBEDDINGS, stack=self.scope.stack_name)
        for layer, sublayer in self._sublayers():
            config = self.scope.stack.config.layers[layer]
            yield self._site(layer, Tap.OUTPUT, sublayer)
            if sublayer is not Sublayer.FEEDFORWARD and addresses.heads_in(config, sublayer):
                yield self._site(layer, Tap.HEAD_OUTPUT, sublayer)
                yield self._site(layer, Tap.GATE_FINAL, sublayer)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens to what no tap shows while the model runs."""
        yield

    def check(self) -> None:
        """Refuse a stream that is no sum of what was written to it."""
        stack = self.scope.stack
        addresses.check_one_stream(stack)
        for layer in range(self.layer):
            if stack.config.layers[layer].convolution is not None:
                raise InputError(
                    f"layer {layer} has a convolution, which reads several tokens at once and is "
                    "no writer of its own",
                    ELSEWHERE,
                )

    def parts(self, record: cached_run.ActivationEditor, rows: Int[Tensor, " m"]) -> StreamParts:
        """What each writer has added to the stream at some tokens, before the attention's norm."""
        embeddings = record[Site(-1, Tap.EMBEDDINGS, stack=self.scope.stack_name)]
        writes = [self._embedded(embeddings.values[rows], rows)]
        for layer, sublayer in self._sublayers():
            residual = getattr(self.scope.stack.layers[layer], f"{sublayer.value}_residual")
            writes.append(self._write(record, layer, sublayer, rows))
            if isinstance(residual.placement, norms.PostNorm):
                writes = [StreamParts.summed(writes).normed(residual.norm)]
        return StreamParts.summed(writes)

    def _sublayers(self) -> Iterator[tuple[int, Sublayer]]:
        """The sublayers that write before the attention reads."""
        for layer in range(self.layer + 1):
            for sublayer in self.scope.stack.config.layers[layer].branches:
                if layer == self.layer and sublayer is self.scope.sublayer:
                    return
                yield layer, sublayer

    def _site(self, layer: int, tap: Tap, sublayer: Sublayer) -> Site:
        return Site(layer, tap, sublayer, self.scope.stack_name)

    def _embedded(self, embeddings: Float[Tensor, "m c"], rows: Int[Tensor, " m"]) -> StreamParts:
        """The vectors of tokens, positions and types, where the model has several of them."""
        model, ids = self.scope.model, self.inputs.ids
        embedding: object = getattr(model, "embedding", None)
        if self.scope.stack_name == "encoder":
            ids = self.inputs.source
        elif self.scope.stack_name == "decoder":
            embedding = getattr(model, "target_embedding", None) or embedding
        if isinstance(embedding, TokenEmbedding) and ids is not None:
            vectors = dict(embedding.vectors(ids, ids.lengths.positions))
            tables = torch.stack([table[rows] for table in vectors.values()], 1)
            names = [f"{name} embedding" for name in vectors]
            parts = StreamParts.of(names, tables).normed(embedding.norm)
            if embedding.project is not None:
                parts = parts.projected(embedding.project.weight, embedding.project.bias)
            # Embeddings that somebody edited are no longer that sum.
            if len(vectors) > 1 and residual_writes.close(parts.total, embeddings):
                return parts
        return StreamParts.of(("embeddings",), embeddings[:, None])

    def _write(
        self,
        record: cached_run.ActivationEditor,
        layer: int,
        sublayer: Sublayer,
        rows: Int[Tensor, " m"],
    ) -> StreamParts:
        module = self.scope.stack.layers[layer]
        inner = getattr(module, sublayer.value, None)
        if inner is None and sublayer is Sublayer.ATTENTION:
            inner = getattr(module, "mixer", None)
        written = record[self._site(layer, Tap.OUTPUT, sublayer)].values[rows]
        heads = addresses.heads_in(self.scope.stack.config.layers[layer], sublayer)
        if inner is None:
            assert isinstance(getattr(module, f"{sublayer.value}_rest"), feedforward.ConstantLayer)
            return StreamParts.of_biases(written)
        if sublayer is Sublayer.FEEDFORWARD or not heads:
            part = "mixer" if isinstance(inner, Mixer) else "mlp"
            return StreamParts.of(
                (part_name(self.scope.stack_name, layer, part),), written[:, None]
            )
        outputs = record[self._site(layer, Tap.HEAD_OUTPUT, sublayer)].values[rows]
        names = head_names(self.scope.stack_name, layer, heads, sublayer)
        write = head_writes(names, outputs, inner.output.weight, inner.output.bias)
        gates = inner.config.gates if isinstance(inner, Attention) else ()
        for gate in gates:
            if gate.at == "final":
                opened = record[self._site(layer, Tap.GATE_FINAL, sublayer)].values[rows]
                slices = written.unflatten(-1, inner.config.gate_shape("final"))
                spread = opened.expand_as(slices).flatten(1)
                multiplies = gate.operation == "multiply"
                write = write.scaled(spread) if multiplies else write.with_bias(spread)
        return write.normed(getattr(module, f"{sublayer.value}_residual").second_norm)


@dataclass(frozen=True, slots=True, eq=False)
class WrappedStreamReader(StreamReader):
    """The same for layers of `transformers`: their MLPs add what their attentions do not."""

    # What the tables of the model gave for the tokens, by the names of their modules.
    vectors: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def listening(self) -> Iterator[None]:
        inner = cast(wrapped_model.WrappedModel, self.scope.model).inner

        def keep(name: str, _: nn.Module, __: Any, output: Tensor) -> None:
            self.vectors[name] = output

        with ExitStack() as hooks:
            for name, module in inner.named_modules():
                if isinstance(module, nn.Embedding):
                    hook = module.register_forward_hook(partial(keep, name))
                    hooks.callback(hook.remove)
            yield

    def sites(self) -> Iterator[Site]:
        yield Site(-1, Tap.EMBEDDINGS, stack=self.scope.stack_name)
        for layer in range(self.layer + 1):
            yield self._site(layer, Tap.BEFORE, Sublayer.ATTENTION)
        for facts, layer in self._attentions():
            sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
            yield self._site(layer, Tap.HEAD_OUTPUT, sublayer)

    def check(self) -> None:
        facts = self._facts
        for attention, layer in facts.attentions:
            if facts.slots > 1 or (layer <= self.layer and attention.write is None):
                raise InputError(
                    f"{attention.path} of this model does not simply add to the residual stream, "
                    "so that the stream is no sum of what heads write",
                    ELSEWHERE,
                )
        if facts.unseen:
            raise InputError(f"the residual stream is not seen: {facts.unseen}", ELSEWHERE)

    def parts(self, record: cached_run.ActivationEditor, rows: Int[Tensor, " m"]) -> StreamParts:
        writes = [self._embedded(self._before(record, 0, rows), rows)]
        for layer in range(self.layer + 1):
            # Together the writes of a layer add what it left behind.
            rest = None
            if layer < self.layer:
                rest = self._before(record, layer + 1, rows) - self._before(record, layer, rows)
            attends = False
            for facts, index in self._attentions():
                if index == layer:
                    writes.append(self._attention_write(record, layer, facts, rows))
                    attends = True
                    rest = None if rest is None else rest - writes[-1].total
            if rest is not None:
                name = part_name(self.scope.stack_name, layer, "mlp" if attends else "layer")
                writes.append(StreamParts.of((name,), rest[:, None]))
        return StreamParts.summed(writes)

    @property
    def _facts(self) -> structure.StackFacts:
        return cast(wrapped_parts.WrappedStack, self.scope.stack).facts

    def _attentions(self) -> Iterator[tuple[structure.ProbedAttention, int]]:
        """The attentions that write before the heads read."""
        crosses = self.scope.sublayer is Sublayer.CROSS
        for facts, layer in self._facts.attentions:
            if layer < self.layer or (layer == self.layer and crosses and not facts.cross):
                yield facts, layer

    def _before(
        self, record: cached_run.ActivationEditor, layer: int, rows: Int[Tensor, " m"]
    ) -> Float[Tensor, "m c"]:
        return record[self._site(layer, Tap.BEFORE, Sublayer.ATTENTION)].values[rows].double()

    def _embedded(self, embeddings: Float[Tensor, "m c"], rows: Int[Tensor, " m"]) -> StreamParts:
        """Tables apart, where the embeddings are their sum."""
        last, tables = int(rows.max()), {}
        for path, vectors in self.vectors.items():
            if vectors.shape[-1] == embeddings.shape[1] and vectors.dim() > 1:
                flat = vectors.reshape(-1, vectors.shape[-1])
                if last < len(flat):
                    tables[_table_name(path)] = flat[rows].double()
        if len(tables) > 1:
            parts = StreamParts.of(tuple(tables), torch.stack(list(tables.values()), 1))
            if residual_writes.close(parts.total, embeddings):
                return parts
        return StreamParts.of(("embeddings",), embeddings[:, None])

    def _attention_write(
        self,
        record: cached_run.ActivationEditor,
        layer: int,
        facts: structure.ProbedAttention,
        rows: Int[Tensor, " m"],
    ) -> StreamParts:
        sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
        outputs = record[self._site(layer, Tap.HEAD_OUTPUT, sublayer)].values[rows]
        assert facts.write is not None, "checked before"
        assert facts.projection is not None, "without it there is no write"
        weight, bias = structure.linear_weight(facts.projection), facts.projection.bias
        names = head_names(self.scope.stack_name, layer, outputs.shape[1], sublayer)
        write = head_writes(names, outputs, weight, cast("Tensor | None", bias))
        return write.normed(facts.write.norm).scaled(facts.write.factor)


def _table_name(path: str) -> str:
    """What a table holds, by the path of its module: "transformer.wpe" holds positions."""
    name = path.rpartition(".")[2].lower()
    kinds = {"type": ("type", "segment"), "position": ("pos", "wpe")}
    kind = next((kind for kind, hints in kinds.items() if any(hint in name for hint in hints)), "")
    return f"{kind or 'token'} embedding"


def head_writes(
    names: Sequence[str],
    outputs: Float[Tensor, "m h d"],
    weight: Float[Tensor, "c hd"],
    bias: Tensor | None,
) -> StreamParts:
    """What each head adds through its columns of the output projection."""
    columns = weight.detach().T.double().contiguous().unflatten(0, outputs.shape[1:])
    written = torch.bmm(outputs.double().transpose(0, 1), columns).transpose(0, 1)
    return StreamParts.of(names, written).with_bias(bias)


def head_names(stack: str, layer: int, heads: int, sublayer: Sublayer) -> list[str]:
    return [str(address) for address in addresses.Block(layer, heads, stack, sublayer).addresses]


def part_name(stack: str, layer: int, part: str) -> str:
    """The name of a part of a layer without heads, such as "L3 mlp"."""
    return f"L{layer} {part}" if stack == "main" else f"{stack} L{layer} {part}"
