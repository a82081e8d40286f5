"""What integer weights cost: perplexity and hidden states beside those of the original."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.errors import InputError
from manyheads.formatting import pluralise
from manyheads.models.build import Model
from manyheads.models.model_interface import ModelInputs
from manyheads.quantization.integer_codes import WeightName
from manyheads.quantization.model_weights import built_in_texts, text_inputs, weights_of
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightQuality:
    """A model with integer weights beside the original, on `tokens` tokens of text.

    `cosine` is the mean over tokens between hidden states. Models that do not predict the next
    token have no perplexity.
    """

    weights: WeightName | None
    tokens: int
    cosine: float
    perplexity: float | None
    original_perplexity: float | None
    megabytes: float
    original_megabytes: float

    @property
    def change(self) -> float | None:
        """By which fraction the perplexity is larger than the original's."""
        if self.perplexity is None or self.original_perplexity is None:
            return None
        return self.perplexity / self.original_perplexity - 1

    def __str__(self) -> str:
        parts = [f"{self.weights or 'float'} weights on {pluralise(self.tokens, 'token')}:"]
        if self.change is not None:
            before = f"{self.original_perplexity:.2f}"
            parts.append(f"perplexity {self.perplexity:.2f} ({before} before, {self.change:+.1%}),")
        parts.append(f"cosine of hidden states {self.cosine:.4f},")
        parts.append(f"{self.megabytes:.0f} MB instead of {self.original_megabytes:.0f}")
        return " ".join(parts)


@checked
def measure_quality(
    model: Model, original: Model, texts: Sequence[str] | None = None
) -> WeightQuality:
    """Compare a model with the one it was rounded from, by default on texts of manyheads.

    They are not those that four-bit weights are rounded by.
    """
    inputs = text_inputs(model, built_in_texts("evaluation") if texts is None else texts)
    if inputs is None:
        raise InputError("the model reads no text", "compare models that have a tokenizer")
    hidden, perplexity = _run(model, inputs)
    original_hidden, original_perplexity = _run(original, inputs)
    return WeightQuality(
        weights=weights_of(model),
        tokens=len(hidden),
        cosine=float(F.cosine_similarity(hidden, original_hidden, dim=-1).mean()),
        perplexity=perplexity,
        original_perplexity=original_perplexity,
        megabytes=_megabytes(model),
        original_megabytes=_megabytes(original),
    )


@torch.inference_mode()
def _run(model: Model, inputs: ModelInputs) -> tuple[Float[Tensor, "n c"], float | None]:
    output = model.run_inputs(inputs)
    assert isinstance(output.hidden, Ragged)
    assert inputs.ids is not None
    if not model.predicts_next_token:
        return output.hidden.values, None
    assert isinstance(output.logits, Ragged)
    pairs = zip(output.logits.to_list(), inputs.ids.to_list(), strict=True)
    losses = [F.cross_entropy(logits[:-1], ids[1:], reduction="none") for logits, ids in pairs]
    return output.hidden.values, math.exp(float(torch.cat(losses).mean()))


def _megabytes(model: Model) -> float:
    return sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e6
