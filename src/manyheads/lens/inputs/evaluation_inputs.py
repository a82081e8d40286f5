"""The metric and the targets with which texts or images evaluate a model."""

from dataclasses import dataclass

import torch

from manyheads.data.masking import Masking, mask_tokens, masking_vocabulary
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.lens.inputs.metrics import Metric, Similarity
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.models import build, encoder, model_interface, readout

# As BERT was trained, but tokens are never replaced by random ones.
MASKING = Masking(mask_fraction=0.15, mask_token_fraction=1.0, random_token_fraction=0.0)


@dataclass(frozen=True, slots=True, eq=False)
class EvaluationInputs:
    """Texts as the model reads them, the metric, and the targets where texts lack them."""

    model_inputs: model_interface.ModelInputs
    metric: Metric
    targets: Targets | None


def prepare_inputs(
    model: build.Model, texts: Inputs, *, targets: Targets | None = None, seed: int = 0
) -> EvaluationInputs:
    """Next tokens for a generative model, masked tokens for an encoder, or its own vectors.

    A model without a readout is compared with itself, a classifier with the `targets`.
    """
    model_inputs = read_inputs(model, texts)
    if model.readout is None:
        return EvaluationInputs(model_inputs, Similarity(), None)
    if targets is not None:
        return EvaluationInputs(model_inputs, "loss", targets)
    if not isinstance(model.config.readout, readout.LanguageHead):
        raise InputError(
            f"{kind_of(model.config.readout)} needs targets to be evaluated",
            "give targets, the correct classes",
        )
    if not isinstance(model, encoder.Encoder):
        return EvaluationInputs(model_inputs, "loss", None)
    assert model_inputs.ids is not None
    words = masking_vocabulary(model.tokenizer, model.config.embedding.vocabulary)
    draw = torch.Generator().manual_seed(seed)
    masked = mask_tokens(model_inputs.ids, words, MASKING, draw)
    lengths = model_inputs.ids.lengths
    answers: list[dict[int, int]] = [{} for _ in range(len(model_inputs))]
    owners = lengths.sequence_of_token[masked.positions].tolist()
    positions = lengths.positions[masked.positions].tolist()
    for owner, position, label in zip(owners, positions, masked.labels.tolist(), strict=True):
        answers[owner][position] = label
    if not any(answers):
        raise InputError("no token of the texts could be masked", "give longer texts")
    return EvaluationInputs(model_interface.ModelInputs(ids=masked.texts), "loss", answers)
