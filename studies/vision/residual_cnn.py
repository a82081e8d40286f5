"""A small residual network of convolutions (arXiv 1512.03385), for images of 32 pixels."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two convolutions of 3 x 3 whose output is added to their input."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != width:
            projection = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inside)) + self.shortcut(x))


class ResidualCNN(nn.Module):
    """Stages of blocks, each after the first at half the resolution; then a mean and a linear map.

    With widths 16, 32, 64 and 3 blocks it is the ResNet-20 of CIFAR-10.
    """

    def __init__(
        self, *, channels: int, widths: Sequence[int], blocks: int, classes: int, seed: int = 0
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            self.stem = nn.Sequential(
                nn.Conv2d(channels, widths[0], 3, padding=1, bias=False),
                nn.BatchNorm2d(widths[0]),
                nn.ReLU(),
            )
            self.blocks = nn.Sequential()
            entering = widths[0]
            for stage, width in enumerate(widths):
                for number in range(blocks):
                    stride = 2 if stage and not number else 1
                    self.blocks.append(ResidualBlock(entering, width, stride))
                    entering = width
            self.head = nn.Linear(entering, classes)
        self.to(memory_format=torch.channels_last)

    def states(self, images: Tensor) -> list[Tensor]:
        """What each block gives."""
        states = [self.stem(images.contiguous(memory_format=torch.channels_last))]
        for block in self.blocks:
            states.append(block(states[-1]))
        return states[1:]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.states(images)[-1].mean((2, 3)))
