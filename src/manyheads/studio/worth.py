"""What every head is worth for one predicted token, streamed to the page."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.gradient_importance import importance
from manyheads.lens.inputs.metrics import StateMetric
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.studio import models, run_cache, views

# Heads of a layer that are ablated before the page hears of them.
CHUNK = 4


class HeadWorth:
    """How much the log-probability of a token falls without each head.

    The first `step` estimates all heads by one backward pass; each further one ablates some heads
    exactly, as `lens.ablate` does with zero, and None is the end.
    """

    def __init__(self, loaded: models.LoadedModel, text: str, position: int, token: int) -> None:
        self._loaded, self._text, self._position, self._token = loaded, text, position, token
        self._inputs: ModelInputs | None = None
        self._heads = [
            [f"L{block.layer}H{head}" for head in range(block.heads)]
            for block in blocks_of(loaded.model)
        ]
        chunks = [
            heads[start : start + CHUNK]
            for heads in self._heads
            for start in range(0, len(heads), CHUNK)
        ]
        self._chunks = iter(chunks)
        self._measured = 0

    def step(self, cancelled: run_cache.IsCancelled) -> dict[str, Any] | None:
        if self._inputs is None:
            # Tokenized here, because tensors of a request have no gradients.
            self._inputs = self._read()
            estimate = importance(self._loaded.model, self._inputs, self._metric, progress=False)
            names = [name for heads in self._heads for name in heads]
            return self._line("gradient", names, estimate["predicted"].means.tolist())
        heads = next(self._chunks, None)
        if heads is None or cancelled():
            return None
        result = ablate(
            self._loaded.model, self._inputs, heads, metric=self._metric, progress=False
        )
        means = result["change"].means.tolist()
        changes = dict(zip(map(str, result.addresses), means, strict=True))
        self._measured += len(heads)
        return self._line("ablation", heads, [changes[head] for head in heads])

    def finish(self) -> dict[str, Any]:
        """Nothing is left to say at the end."""
        return {}

    def _read(self) -> ModelInputs:
        """The text, up to the predicted token where later ones do not matter."""
        text = self._loaded.read_text(self._text)
        return (text.truncate(self._position + 1) if self._loaded.generates else text).inputs

    @property
    def _metric(self) -> StateMetric:
        model, position, token = self._loaded.model, self._position, self._token
        readout = model.readout
        assert readout is not None, "the model predicts tokens"

        def log_probability(hidden: Ragged, _: Sequence[int]) -> Float[Tensor, " b"]:
            logits = readout.logits(hidden.values[position : position + 1], model.table)
            return logits.float().log_softmax(-1)[:, token]

        return StateMetric(log_probability)

    def _line(self, by: str, heads: list[str], changes: list[float]) -> dict[str, Any]:
        return {
            "by": by,
            "token": self._loaded.output_text(self._token),
            "heads": heads,
            "worth": [views.rounded(-change) for change in changes],
            "measured": self._measured,
            "total": sum(map(len, self._heads)),
        }
