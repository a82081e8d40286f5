"""Encoders of text: every token may see both ways."""

from dataclasses import dataclass

from manyheads.models.text import TextConfig, TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(TextConfig):
    """A model that reads a text: BERT, ModernBERT and their kin."""


class Encoder(TextModel):
    """A model that reads a text.

    >>> import torch
    >>> from manyheads.models.build import build
    >>> model = build("council", seed=0)
    >>> model(torch.tensor([[1, 2, 3]])).hidden.shape
    torch.Size([1, 3, 128])
    """
