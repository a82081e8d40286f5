"""The stacks, layers, attentions and readout of a wrapped model: facts, not computations."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.bridge.registry import current_listener
from manyheads.bridge.structure import ProbedAttention, ReadoutFacts, StackFacts, linear_weight
from manyheads.bridge.watched_run import WatchedRun
from manyheads.errors import InputError, NativeModelError
from manyheads.kernels.contract import Request
from manyheads.models.layer import Branch, Layer, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, ReadoutLayer, SpanHead, TokenHead
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.masks import Full
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer


class Outside(nn.Module):
    """A part that stands for one of `transformers`: what it lacks needs a native model."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            raise NativeModelError(f"{type(self).__name__}.{name}") from None


class OutputProjection:
    """The output projection of an attention, with the weight as `nn.Linear` has it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weight(self) -> Float[Tensor, "c hd"]:
        return linear_weight(self._module)

    @property
    def bias(self) -> Float[Tensor, " c"] | None:
        return cast("Tensor | None", self._module.bias)


class WrappedAttention(Outside, Attention):
    """The facts of an attention of `transformers`."""

    def __init__(self, facts: ProbedAttention, width: int) -> None:
        nn.Module.__init__(self)
        self.config = AttentionConfig(
            width=width,
            heads=facts.heads,
            kv_heads=facts.key_heads,
            head_size=facts.size,
            mask=facts.mask if not facts.cross else Full(),
            scale=facts.scale,
            sink="learned" if facts.has_sink else "none",
            keys_from="memory" if facts.cross else "itself",
        )
        projection = facts.projection
        output = None if projection is None else OutputProjection(projection)
        self.output = output  # type: ignore[assignment]
        # Where only the weights are seen, they are not computed from scores that can be.
        self.has_scores = facts.weights is None
        # The values come with each call.
        self.sink = torch.zeros(facts.heads) if facts.has_sink else None  # type: ignore[assignment]
        self.table = self.head_scale = None
        self.output_norm = nn.Identity()


class WrappedLayer(Outside, Layer):
    """The attentions of one layer."""

    def __init__(self, attentions: Sequence[ProbedAttention], width: int) -> None:
        nn.Module.__init__(self)
        by_cross = {facts.cross: WrappedAttention(facts, width) for facts in attentions}
        self.attention, self.cross = by_cross.get(False), by_cross.get(True)
        self.feedforward = self.attention_rest = self.cross_rest = None
        self.config = LayerConfig(
            attention=None if self.attention is None else Branch(self.attention.config),
            cross=None if self.cross is None else Branch(self.cross.config),
            feedforward=None,
        )


class WrappedStack(Outside, Stack):
    """The layers of one residual stream of a wrapped model."""

    def __init__(self, facts: StackFacts) -> None:
        nn.Module.__init__(self)
        by_layer: list[list[ProbedAttention]] = [[] for _ in range(facts.depth)]
        for attention, index in facts.attentions:
            by_layer[index].append(attention)
        self.name, self.position_owner = facts.name, tuple(range(facts.depth))
        self.layers = nn.ModuleList(
            WrappedLayer(attentions, facts.width) for attentions in by_layer
        )
        self.config = StackConfig(
            width=facts.width, layers=tuple(cast(Layer, layer).config for layer in self.layers)
        )
        self._facts = facts

    @property
    def final_norm(self) -> nn.Module:  # type: ignore[override]
        if self._facts.final_norm is None:
            raise InputError(
                "more than one norm stands between the last layer and the logits of this model, or "
                "no linear layer makes them, so that its layers cannot be read as logits",
                "use ablation, patching or gradients, or a model that predicts the next token",
            )
        return self._facts.final_norm

    @property
    def facts(self) -> StackFacts:
        return self._facts

    def check_entry(self, layer: int) -> None:
        """Refuse to resume at a layer where the residual stream is not seen."""
        reason = self._facts.unseen
        if reason and (layer % self._facts.slots or not self._facts.seen_layers):
            raise InputError(
                f"the model cannot resume at layer {layer} of its {self.name} stack: {reason}",
                "use what only reads: statistics, patterns, kinds",
            )

    def request(self, layer: int, sublayer: Sublayer, query: Ragged, key: Ragged) -> Request:
        """That of the call which the watcher is seeing."""
        running = current_listener()
        assert isinstance(running, WatchedRun), "queries and keys are measured while they are seen"
        request = running.requests[self.name, layer, sublayer]
        assert request.queries is query.lengths
        assert request.keys is key.lengths
        return request


class WrappedReadout(Outside, ReadoutLayer):
    """The linear layer behind the logits."""

    def __init__(
        self, facts: ReadoutFacts, config: LanguageHead | ClassHead | TokenHead | SpanHead
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.transform, self.product = config, nn.Identity(), None
        self._facts = facts

    @property
    def bias(self) -> Float[Tensor, " v"] | None:  # type: ignore[override]
        return cast("Tensor | None", self._facts.linear.bias)

    def vectors(self, table: Tensor | None) -> Float[Tensor, "v c"]:  # noqa: ARG002
        return linear_weight(self._facts.linear)

    def finish(self, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        return self._facts.finish(logits)

    @property
    def factor(self) -> float:
        return self._facts.amount if self._facts.change == "scale" else 1.0

    @property
    def subtracts(self) -> bool:
        return self._facts.change == "none"
