"""Modules for small models, each built to show one thing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Calls(nn.Module):
    """Its forward is the function that it is given; parameters and modules are given by name."""

    def __init__(self, forward: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.run(self, *inputs)


class Mlp(nn.Module):
    """Wide inside, narrow outside: what replay is good for."""

    def __init__(self, width: int, times: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, times * width), nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))
