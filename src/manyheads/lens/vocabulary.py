"""Directions of the residual stream in words: those that enter along them, those they make say."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.lens.circuits import folded
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.models.readout import LanguageHead, ReadoutLayer
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision

__all__ = ["Through", "Vocabulary", "vocabulary_of"]

Through = Literal["unembedding", "transform and unembedding", "embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The vectors of the words at both ends of a stack, and what leads to the last.

    `through` is "unembedding" where a language head scores the words, with the final norm folded
    in; "transform and unembedding" where the head has a layer of its own (BERT), which a direction
    is led through as if it were alone; "embedding" where there is no language head, and the words
    that enter the model stand for those that leave it.
    """

    enter: Float[Tensor, "v c"]
    leave: Float[Tensor, "v c"]
    through: Through
    final_norm: nn.Module
    readout: ReadoutLayer | None

    def said(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The score that each direction, written to the stream, gives every word."""
        if self.through == "transform and unembedding":
            assert self.readout is not None
            with torch.no_grad():
                weight = next(self.readout.parameters())
                normed = self.final_norm(directions.to(weight.dtype))
                directions = self.readout.features(normed).float()
        return directions @ self.leave.T

    def read(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The cosine of each direction with the vector by which every word enters."""
        return F.normalize(directions, dim=-1) @ F.normalize(self.enter, dim=-1).T


def vocabulary_of(model: Model, stack: StackName | None = None) -> Vocabulary:
    """The words of a model's stack; a `Vision` has none, and is refused."""
    if isinstance(model, Vision):
        raise InputError("a Vision has no words to read or write", "use a model of texts")
    embedding, end = model.embedding, model.stack if not isinstance(model, Seq2Seq) else None
    if isinstance(model, Seq2Seq):
        end = model.encoder if stack == "encoder" else model.decoder
        if stack != "encoder" and model.target_embedding is not None:
            embedding = model.target_embedding
    assert end is not None
    table = embedding.tokens.weight.detach().float()
    with torch.no_grad():
        scaled = embedding.tokens.weight * embedding.config.scale
        enter = embedding.norm(scaled).detach().float()
    head = model.config.readout
    if stack == "encoder" or not isinstance(head, LanguageHead):
        return Vocabulary(enter, table, "embedding", end.final_norm, None)
    readout = model.readout
    assert readout is not None
    words = readout.vectors(model.table).detach().float()
    if head.transform is not None:
        return Vocabulary(enter, words, "transform and unembedding", end.final_norm, readout)
    leave = folded(words, end.final_norm) * head.scale
    return Vocabulary(enter, leave, "unembedding", end.final_norm, readout)
