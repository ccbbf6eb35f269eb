"""Steps of small models, traced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.records import StepTrace
from lowtide.trace import trace


def mean_square(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def traced() -> Callable[..., StepTrace]:
    """Trace ``loss(model(x)).backward()`` from fresh gradients, with an optimizer step where one is made."""

    def run(model: nn.Module, x: torch.Tensor, *, loss: Callable = mean_square, optimizer: Callable | None = None) -> StepTrace:
        updates = optimizer(model.parameters()) if optimizer else None

        def step() -> None:
            loss(model(x)).backward()
            if updates is not None:
                updates.step()
            model.zero_grad()

        return trace(model, step)

    return run
