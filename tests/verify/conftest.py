"""A small model of blocks, a way to plant faults in one of them, and steps that train it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture(autouse=True)
def _no_one_counts_collections() -> Iterator[None]:
    """Hypothesis does, in globals of its own, and whatever region runs meanwhile seems to write to them."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


class Block(nn.Module):
    """Computes something else where ``fault`` says so."""

    def __init__(self, fault: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("count", torch.zeros(()))
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        if self.fault is not None:
            h = self.fault(self, h)
        return x + torch.sin(self.down(h))


class Net(nn.Module):
    """Four blocks and a head; ``call`` is how a block is run."""

    def __init__(self, fault: Any = None, call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(fault if index == 2 else None) for index in range(4))
        self.head = nn.Linear(8, 3)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def step_of(model: nn.Module, *, batch: int = 6, between: Callable[[], object] = lambda: None) -> Callable[[], torch.Tensor]:
    """Trains with momentum; ``between`` runs between forward and backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(batch, 8)).square().mean()
        between()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.fixture
def net() -> Callable[..., tuple[nn.Module, Callable[[], torch.Tensor]]]:
    """``net(fault, call=, between=, batch=)``: a model and its step."""

    def make(fault: Any = None, *, between: Any = lambda _: None, batch: int = 6, **options: Any) -> Any:
        model = Net(fault, **options)
        return model, step_of(model, batch=batch, between=lambda: between(model))

    return make
