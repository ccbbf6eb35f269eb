"""An encoder-decoder with skip connections: tensors made early are read late, so lifetimes are nested, not chained.

After Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation" (2015), with group norm and
SiLU added. It takes the noise off pages of Python source.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.workload import Workload
from lowtide.workloads.text import pages

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["UNet", "unet"]

GROUPS = 4


class Double(nn.Module):
    """Two convolutions with norms, ``[batch, inputs, h, w]`` to ``[batch, outputs, h, w]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve, norm and activate, twice."""
        return F.silu(self.norm2(self.conv2(F.silu(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Images ``[batch, 3, 32, 32]`` to images of the same shape; each level halves the resolution."""

    def __init__(self, *, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(inputs, outputs) for inputs, outputs in pairwise((3, *widths[:-1])))
        self.bottom = Double(widths[-2], widths[-1])
        steps = list(pairwise(reversed(widths)))
        self.rise = nn.ModuleList(nn.ConvTranspose2d(inputs, outputs, 2, stride=2) for inputs, outputs in steps)
        self.up = nn.ModuleList(Double(2 * outputs, outputs) for _, outputs in steps)
        self.out = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Go down, keep what each level made, and meet it again on the way up."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for rise, up in zip(self.rise, self.up, strict=True):
            x = up(torch.cat([skips.pop(), rise(x)], dim=1))
        return self.out(x)  # type: ignore[no-any-return]


def unet(
    *,
    widths: tuple[int, ...] = (24, 48, 72, 128),
    batch: int = 64,
    dataset: int = 1000,
    noise: float = 0.5,
    device: str = "cpu",
) -> Workload:
    """A U-shaped CNN that takes noise off pages of source, trained by Adam.

    Args:
        widths: channels of each level, multiples of 4, at most six levels.
        batch: images a step.
        dataset: pages to train on, at most.
        noise: standard deviation of what is added; pixels lie between 0 and 1.
        device: where model and data live.

    Returns:
        A workload whose step returns its loss, a scalar.
    """
    model = UNet(widths=widths).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = pages(dataset)[0].to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        clean = images[torch.randint(len(images), (batch,)).to(images.device)] / 128.0
        noisy = clean + noise * torch.randn(clean.shape).to(clean.device)
        loss = F.mse_loss(model(noisy), clean)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return Workload(model, step, optimizer, name="unet")
