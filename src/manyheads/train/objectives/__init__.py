"""What a model is trained for: each objective turns a model and a batch into a loss."""

from manyheads.train.objectives.classes import (
    ImageClassification,
    SequenceClassification,
    TokenClassification,
)
from manyheads.train.objectives.objective import Objective, Routing
from manyheads.train.objectives.pairs import Contrastive
from manyheads.train.objectives.words import CausalLM, MaskedLM, Seq2SeqLM

__all__ = [
    "CausalLM",
    "Contrastive",
    "ImageClassification",
    "MaskedLM",
    "Objective",
    "Routing",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
]
