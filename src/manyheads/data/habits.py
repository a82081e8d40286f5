"""The range that a model's images are brought to, as its preprocessor_config.json says."""

import json

import torch
from torch import Tensor

from manyheads.models.vision import Vision

__all__ = ["image_habits"]


def image_habits(model: Vision, channels: int) -> tuple[Tensor, Tensor]:
    """The mean and the deviation a channel; a half of each where nothing is said."""
    said = json.loads(model.side_files.get("preprocessor_config.json", b"{}"))
    found = []
    for name in ("image_mean", "image_std"):
        value = said.get(name) or [0.5] * channels
        found.append(torch.tensor(value, dtype=torch.float32)[:channels].reshape(-1, 1, 1))
    return found[0], found[1]
