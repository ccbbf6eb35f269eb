"""A snapshot puts back all that a step may change."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch
from torch import nn

from lowtide.trace import TrainingState, find_optimizers


class Moody(nn.Module):
    """Keeps state in every way a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("ema", torch.zeros(3))
        self.calls = 0
        self.history: list[float] = []
        self.recent: deque[float] = deque(maxlen=2)
        self.last: torch.Tensor | None = None
        self.cache = torch.zeros(3)
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.python = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.sum()))
        self.recent.append(float(x.sum()))
        self.ema = 0.9 * self.ema + x.detach().mean(0)
        self.cache += 1
        self.last = x
        noise = torch.rand(3, generator=self.generator) + self.numpy.random() + self.python.random()
        return self.norm(self.linear(x * noise * random.random() * np.random.rand()))


def everything(model: Moody, optimizer: torch.optim.Optimizer) -> list[object]:
    values: list[object] = [v.tolist() for v in model.state_dict().values()]
    values += [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    values += [model.calls, list(model.history), list(model.recent), model.cache.tolist(), model.last is None, model.training]
    values += [model.generator.get_state().tolist(), model.numpy.bit_generator.state, model.python.getstate()]
    values += [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    values += [{k: v.tolist() for k, v in s.items()} for s in optimizer.state.values()] + [optimizer.param_groups[0]["lr"]]
    return values


def step(model: Moody, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.5


def test_restores_everything_before_the_optimizer_has_state() -> None:
    model = Moody()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    state = TrainingState(model)
    step(model, optimizer)
    model.eval()
    assert everything(model, optimizer) != before
    state.restore()
    assert everything(model, optimizer) == before
    assert not optimizer.state


def test_restores_again_and_again_in_the_same_tensors() -> None:
    model = Moody()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    before, identities = everything(model, optimizer), [id(t) for s in optimizer.state.values() for t in s.values()]
    state = TrainingState(model)
    for _ in range(3):
        step(model, optimizer)
        state.restore()
        assert everything(model, optimizer) == before
    assert [id(t) for s in optimizer.state.values() for t in s.values()] == identities


def test_finds_the_optimizers_of_this_model_alone() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mine = torch.optim.SGD(model.parameters())
    theirs = torch.optim.SGD(other.parameters())
    assert find_optimizers(model) == [mine]
    assert find_optimizers(other) == [theirs]
