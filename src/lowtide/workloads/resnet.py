"""A residual CNN with batch norm whose stages differ in width, resolution and depth, so no two regions cost the same.

Blocks and stem are those of the CIFAR networks in He et al., "Deep residual learning for image recognition" (2016). It
classifies pages of Python source by the package that they come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.workload import Workload
from lowtide.workloads.text import CLASSES, pages

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ResNet", "resnet"]


class Block(nn.Module):
    """Two convolutions beside a residual, ``[batch, inputs, h, w]`` to ``[batch, outputs, h/stride, w/stride]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Convolve twice, add the shortcut, and rectify in place, as such networks do."""
        inner = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(inner)).add_(self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """Images ``[batch, 3, 32, 32]`` to logits ``[batch, 10]``; each stage but the first halves the resolution."""

    def __init__(self, *, widths: tuple[int, ...], depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True))
        self.stages = nn.Sequential(*(_stage(i, widths, depths) for i in range(len(widths))))
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        return self.head(self.stages(self.stem(images)).mean((2, 3)))  # type: ignore[no-any-return]


def resnet(
    *,
    widths: tuple[int, ...] = (24, 48, 96),
    depths: tuple[int, ...] = (2, 4, 3),
    batch: int = 64,
    dataset: int = 1000,
    device: str = "cpu",
) -> Workload:
    """A residual CNN that tells packages by the look of their pages, trained by SGD with momentum.

    Args:
        widths: channels of each stage.
        depths: blocks of each stage, as many numbers as ``widths``.
        batch: images a step.
        dataset: pages to train on, at most.
        device: where model and data live.

    Returns:
        A workload whose step returns its loss, a scalar.
    """
    model = ResNet(widths=widths, depths=depths).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = (data.to(device) for data in pages(dataset))

    def step() -> Tensor:
        optimizer.zero_grad()
        drawn = torch.randint(len(images), (batch,)).to(images.device)
        loss = F.cross_entropy(model(images[drawn] / 128.0), labels[drawn])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Workload(model, step, optimizer, name="resnet")


def _stage(index: int, widths: tuple[int, ...], depths: tuple[int, ...]) -> nn.Sequential:
    width, before = widths[index], widths[max(index - 1, 0)]
    first = Block(before, width, stride=2 if index else 1)
    return nn.Sequential(first, *(Block(width, width, stride=1) for _ in range(depths[index] - 1)))
