"""Classes of images by a ViT or a CNN, and from how far away their layers read."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads import build, lens
from manyheads.models import Vision
from manyheads.models.recipes import vit
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap
from studies.images import SIDE
from studies.study import Settings
from studies.training import Batch, even_lengths
from studies.vision.residual_cnn import ResidualCNN


def make_model(kind: str, settings: Settings, channels: int, classes: int, seed: int) -> nn.Module:
    """The "ViT" or "CNN" of the settings."""
    if kind == "CNN":
        return ResidualCNN(**settings["CNN"], channels=channels, classes=classes, seed=seed)
    options: dict[str, Any] = {"image": SIDE, "channels": channels, "classes": classes}
    return build(vit(**settings["ViT"], **options), seed=seed)


class LayerOutputs:
    """A watcher that collects the residual stream after each layer, with its gradient."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def wants(self, site: Site) -> bool:
        return site.tap is Tap.AFTER and site.sublayer is Sublayer.FEEDFORWARD

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), site
        self.values.append(value.values)


def run_stack(model: Vision, images: Tensor, watch: LayerOutputs | None = None) -> Ragged:
    """What the readout receives; lengths are made once, so that a step can be recorded."""
    tokens = model.embedding(images)
    lengths = even_lengths(*tokens.shape[:2], tokens.device)
    return model.stack(Ragged(tokens.flatten(0, 1), lengths), watch=watch)[0]


def class_logits(model: nn.Module, images: Tensor) -> Tensor:
    """In bfloat16 on CUDA."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
        if not isinstance(model, Vision):
            return model(images).float()
        assert model.readout is not None
        return model.readout(run_stack(model, images), None).float()


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(class_logits(model, batch[0]), batch[1])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, batch: int = 1000) -> float:
    """In percent."""
    right = [
        (class_logits(model, part).argmax(1) == classes).float()
        for part, classes in zip(images.split(batch), labels.split(batch), strict=True)
    ]
    return 100 * float(torch.cat(right).mean())


def grid_distances(side: int, step: int) -> Tensor:
    """Between the centers of the squares of a grid, in pixels: [side * side, side * side]."""
    ticks = torch.arange(side, dtype=torch.float32) * step
    places = torch.cartesian_prod(ticks, ticks)
    return torch.cdist(places, places)


def attention_distances(model: Vision, images: Tensor) -> list[list[float]]:
    """By layer and head, how many pixels are between a patch and those it attends to, on average.

    As in arXiv 2010.11929: distances weighted by attention. The class token has no place; the
    weights of the patches are scaled to a sum of one without it.
    """
    size = model.config.patches.size
    distances = grid_distances(SIDE // size, size).to(images.device)
    sums: dict[tuple[int, int], list[Tensor]] = {}
    for pattern in lens.patterns(model, list(images)).each:
        weights = pattern.weights[1:, 1:].float()
        weights = weights / weights.sum(1, keepdim=True)
        head = pattern.address.head
        sums.setdefault((head.layer, head.head), []).append((weights * distances).sum(1).mean())
    means = {head: float(torch.stack(values).mean()) for head, values in sums.items()}
    layers = 1 + max(layer for layer, _ in means)
    return [[means[head] for head in sorted(means) if head[0] == layer] for layer in range(layers)]


def gradient_distances(model: nn.Module, images: Tensor, seed: int = 0) -> list[float]:
    """By layer, how far the pixels lie that the middle of its output depends on, on average.

    Weighted by the gradient's absolute value (arXiv 1701.04128) for a random direction of the
    output: the effective receptive field as one distance in pixels.
    """
    images = images.clone().requires_grad_()
    if isinstance(model, Vision):
        watch = LayerOutputs()
        run_stack(model, images, watch)
        side = SIDE // model.config.patches.size
        states = [
            values.unflatten(0, (len(images), -1))[:, 1:].unflatten(1, (side, side))
            for values in watch.values
        ]
    else:
        assert isinstance(model, ResidualCNN)
        states = [state.permute(0, 2, 3, 1) for state in model.states(images)]
    generator = torch.Generator().manual_seed(seed)
    ticks = torch.arange(SIDE, dtype=torch.float32, device=images.device)
    distances = []
    for state in states:
        side = state.shape[1]
        directions = torch.randn(len(images), state.shape[3], generator=generator)
        middle = (state[:, side // 2, side // 2] * directions.to(images.device)).sum()
        (gradient,) = torch.autograd.grad(middle, images, retain_graph=True)
        field = gradient.abs().sum((0, 1))
        center = (side // 2 + 0.5) * SIDE / side - 0.5
        away = torch.hypot(ticks[:, None] - center, ticks[None] - center)
        distances.append(float((field * away).sum() / field.sum()))
    return distances
