"""A region inside the replay of another hands its inputs on as in the forward, in fewer steps where there is nothing to take apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engine import checkpoint
from lowtide.engine._region import Region


class _Chain:
    """Nothing in it can change."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.sin().exp()


def _around_module(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    inner = region(layer)
    return lambda x: inner(inner(x))


def _around_object(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    inner = region(_Chain([layer, nn.Tanh()]))
    return lambda x: inner(inner(x))


def _around_function(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    inner = region(_plain)
    return lambda x: layer(inner(inner(x)))


def _around_closure(region: Callable[..., Any], layer: nn.Module) -> Callable[..., Any]:
    def outer(x: torch.Tensor) -> torch.Tensor:
        made = layer(x)  # what was computed comes in as a variable, and has to be handed on as well
        inner = region(lambda y: (y * made).sin())
        return inner(inner(x * 2))

    return outer


@pytest.mark.parametrize(
    ("make", "taken_apart"), [(_around_module, False), (_around_object, False), (_around_function, False), (_around_closure, True)]
)
def test_a_region_in_a_replay(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Any], taken_apart: bool) -> None:
    torch.manual_seed(0)
    long_way: list[Any] = []
    there = Region.run_in_replay
    monkeypatch.setattr(Region, "run_in_replay", staticmethod(lambda *given: long_way.append(given) or there(*given)))
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    expected = torch.autograd.grad(make(lambda fn: fn, layer)(x).square().sum(), [x, *layer.parameters()])
    run = checkpoint(make(checkpoint, layer))
    for _ in range(4):
        found = torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()])
        assert all(map(torch.equal, found, expected))
    assert bool(long_way) is taken_apart
