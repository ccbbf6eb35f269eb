"""Modules and hooks that are exchanged, by the region or between its forward and its backward: a replay runs those of the forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch_private as private


def _times(factor):
    return lambda module, args, output: output * factor


class _Changes(nn.Module):
    """Does to its layer what it is told, in each call from some call on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.act = nn.Tanh()
        self.handle = None

    def register(self):
        self.handle = self.layer.register_forward_hook(_times(1.5))

    def remove(self):
        if self.handle is not None:
            self.handle.remove()

    def swap(self):
        self.act = nn.ReLU() if isinstance(self.act, nn.Tanh) else nn.Tanh()

    def forward(self, x, change=None):
        y = torch.sin(self.act(self.layer(x))).exp()
        if change is not None:
            getattr(self, change)()
        return torch.sin(self.act(self.layer(y))).exp()

    def state(self):
        return len(self.layer._forward_hooks), type(self.act).__name__


def _step(run, model, change=None, between=None):
    model.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    loss = run(x, change).sum()
    if between is not None:
        getattr(model, between)()
    loss.backward()
    return x.grad, model.layer.weight.grad.clone(), model.state()


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("change", ["register", "swap"])
def test_exchanged_by_the_region(compare, change, start):
    def scenario(region):
        torch.manual_seed(0)
        model = _Changes()
        run = region(model)
        return [_step(run, model, change if turn >= start else None) for turn in range(8)]

    compare(scenario)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_hook_removed_by_the_region(compare, start):
    def scenario(region):
        torch.manual_seed(0)
        model = _Changes()
        run, seen = region(model), []
        for turn in range(8):
            model.register()
            seen.append(_step(run, model, "remove" if turn >= start else None))
            model.remove()
        return seen

    compare(scenario)


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("between", ["register", "remove", "swap"])
def test_exchanged_between_forward_and_backward(compare, between, start):
    def scenario(region):
        torch.manual_seed(0)
        model = _Changes()
        run, seen = region(model), []
        for turn in range(8):
            if between == "remove":
                model.register()
            seen.append(_step(run, model, None, between if turn >= start else None))
            model.remove()
        return seen

    compare(scenario)


def _doubled(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor | None:
    return result * 2 if isinstance(module, nn.Linear) else None


def _doubled_before(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
    return (args[0] * 2,) if isinstance(module, nn.Linear) else None


def _of_all_modules(before: bool) -> Any:
    if before:
        return nn.modules.module.register_module_forward_pre_hook(_doubled_before)
    return nn.modules.module.register_module_forward_hook(_doubled)


@pytest.mark.parametrize("calls_before", [0, 1, 4])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("registered", ["between", "before forward", "before forward, removed between"])
def test_hooks_of_all_modules(registered, before, nested, calls_before):
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    inner = lowtide.checkpoint(layer)
    run = lowtide.checkpoint(nn.Sequential(nn.Tanh(), layer)) if not nested else lowtide.checkpoint(lambda x: inner(x.tanh()))
    for _ in range(calls_before):
        run(torch.randn(2, 3, requires_grad=True)).sum().backward()
    x = torch.randn(2, 3, requires_grad=True)
    handle = _of_all_modules(before) if registered != "between" else None
    try:
        expected = torch.autograd.grad(layer(x.tanh()).sin().sum(), [x, *layer.parameters()])
        loss = run(x).sin().sum()
        if handle is not None and registered.endswith("removed between"):
            handle.remove()
        elif handle is None:
            handle = _of_all_modules(before)
        tables = [dict(table) for table in private.HOOKS_OF_ALL_MODULES]
        found = torch.autograd.grad(loss, [x, *layer.parameters()])
        assert tables == [dict(table) for table in private.HOOKS_OF_ALL_MODULES]
    finally:
        handle.remove()
    assert all(map(torch.equal, found, expected))
    assert not any(private.HOOKS_OF_ALL_MODULES)
