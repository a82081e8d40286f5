"""Training objectives: each computes a loss from a model and a batch."""

from manyheads.train.objectives.classification import (
    ImageClassification,
    MultiLabelClassification,
    SequenceClassification,
    TokenClassification,
)
from manyheads.train.objectives.contrastive import Contrastive
from manyheads.train.objectives.distillation import Distillation
from manyheads.train.objectives.language_modeling import CausalLM, MaskedLM, Seq2SeqLM
from manyheads.train.objectives.objective import Objective, Routing

__all__ = [
    "CausalLM",
    "Contrastive",
    "Distillation",
    "ImageClassification",
    "MaskedLM",
    "MultiLabelClassification",
    "Objective",
    "Routing",
    "Seq2SeqLM",
    "SequenceClassification",
    "TokenClassification",
]
