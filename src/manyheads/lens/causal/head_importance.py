"""How much a model needs each of its heads: exactly by ablation, or estimated by gradients."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from manyheads.errors import InputError
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.causal.gradient_importance import importance
from manyheads.lens.inputs.evaluation_inputs import EvaluationInputs, prepare_inputs
from manyheads.lens.inputs.metrics import Similarity
from manyheads.lens.inputs.texts import Inputs
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.lens.results.tables import FloatsByHead
from manyheads.models import build, readout

ImportanceMethod = Literal["auto", "ablation", "gradient", "none"]
# Gradients replace ablation where ablating every head would take more multiplications; 1.1e12 took
# 59 seconds of an aarch64 core.
MAX_MULTIPLICATIONS = 1.5e12


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadImportance:
    """How much worse a model gets without each head: positive where it needs the head.

    By `metric`, `change` is the rise of the loss in nats per token or the drop in similarity of
    text vectors; by `by`, each head was ablated, or its effect estimated from one backward pass.
    """

    change: FloatsByHead
    errors: FloatsByHead
    metric: Literal["loss", "similarity"]
    by: Literal["ablation", "gradient"]
    baseline: float | None
    texts: int

    @property
    def measure(self) -> str:
        """The key of the measure, as in the table of measures."""
        return "loss_change" if self.metric == "loss" else "similarity_drop"

    @property
    def harmful(self) -> list[int]:
        """Indices of heads without which the model is better by more than two standard errors."""
        harmful = np.flatnonzero(-self.change > 2 * self.errors)
        return sorted(harmful.tolist(), key=lambda index: self.change[index])


def measure_importance(
    model: build.Model, texts: Inputs, by: ImportanceMethod, tokens: int, progress: bool
) -> tuple[HeadImportance | None, str]:
    """The importance of every head, or the reason why it cannot be known."""
    if by == "none":
        return None, "it was switched off"
    if model.reads_images:
        return None, "an image alone does not say what the right class is"
    if model.readout is not None and not isinstance(model.config.readout, readout.LanguageHead):
        return None, "a text alone does not say what the right class is"
    inputs = prepare_inputs(model, texts)
    method = _choose_method(model, by, tokens, inputs)
    measure, name = (ablate, "change") if method == "ablation" else (importance, "predicted")
    blocks = blocks_of(model)
    values: dict[Address, tuple[float, float]] = {}
    # An encoder-decoder has three maps: the encoder's, the decoder's, and that between them.
    for stack, sublayer in dict.fromkeys((block.stack, block.sublayer) for block in blocks):
        result = measure(
            model,
            inputs.model_inputs,
            metric=inputs.metric,
            targets=inputs.targets,
            stack=stack,
            sublayer=sublayer,
            progress=progress,
        )
        pairs = zip(result[name].means.tolist(), result[name].errors.tolist(), strict=True)
        values |= dict(zip(result.addresses, pairs, strict=True))
    unknown = (np.nan, np.nan)
    rows = [values.get(head, unknown) for block in blocks for head in block.addresses]
    change, errors = np.array(rows).T
    higher = isinstance(inputs.metric, Similarity)
    return HeadImportance(
        change=-change if higher else change,
        errors=errors,
        metric="similarity" if higher else "loss",
        by=method,
        baseline=result.metadata.get("baseline"),
        texts=int(result.metadata.get("texts", 0)),
    ), ""


def _choose_method(
    model: build.Model, by: ImportanceMethod, tokens: int, inputs: EvaluationInputs
) -> Literal["ablation", "gradient"]:
    if isinstance(inputs.metric, Similarity):
        if by == "gradient":
            raise InputError(
                "gradients say nothing about a model of text vectors: its similarity to itself is "
                "at its maximum, where all gradients are 0",
                "use --by ablation",
            )
        return "ablation"
    if by == "ablation" or by == "gradient":
        return by
    weights = sum(weight.numel() for weight in model.parameters())
    heads = sum(block.heads for block in blocks_of(model))
    # Ablating a head of the middle layer runs half of the layers again.
    return "ablation" if heads / 2 * tokens * weights <= MAX_MULTIPLICATIONS else "gradient"
