"""Regions on what is no module, and regions in such regions, still notice everything once their calls go the short way."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

WARM = 4


def step(run, x):
    run(x * 1).square().sum().backward()


SCALE = 2.0


def scaled_sine(x):
    return torch.sin(x * SCALE).exp()


class Chain:
    """No module, but something with attributes that can be called."""

    def __init__(self, parts, scale=1.0):
        self.parts, self.scale = parts, scale

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x * self.scale


CHANGES = {
    "global": lambda target, monkeypatch: monkeypatch.setitem(globals(), "SCALE", 3.0),
    "attribute": lambda target, monkeypatch: monkeypatch.setattr(target, "scale", 3.0),
    "list": lambda target, monkeypatch: target.parts.append(torch.cos),
    "entry": lambda target, monkeypatch: target.parts.__setitem__(0, torch.cos),
    "attribute, by another list": lambda target, monkeypatch: monkeypatch.setattr(target, "parts", [torch.cos, torch.cos]),
    "nothing": lambda target, monkeypatch: None,
}


@pytest.mark.parametrize("when", ["between calls", "before backward"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callable_depends_on_changes(compare, monkeypatch, steadily, change, when):
    def scenario(region):
        with monkeypatch.context() as patches:
            target = scaled_sine if change == "global" else Chain([torch.sin, torch.exp], 2.0)
            run = region(target)
            for _ in range(WARM):
                step(run, torch.randn(3, requires_grad=True))
            x = torch.randn(3, requires_grad=True)
            if when == "between calls":
                CHANGES[change](target, patches)
            loss = run(x * 1).square().sum()
            CHANGES[change](target, patches)
            loss.backward()
            step(run, x)
            return x.grad

    compare(scenario)
    assert steadily["calls"] >= WARM - 2 or change == "global"


def test_a_callable_that_goes_another_way(compare):
    def scenario(region):
        def branching(x):
            return torch.sin(x).exp() if x.sum() > 0 else torch.cos(x).tanh()

        run, x = region(branching), torch.rand(3, requires_grad=True)
        for sign in (1, 1, 1, -1, 1, -1, -1):
            run(x * sign).sum().backward()
        return x.grad

    compare(scenario)


def test_regions_in_regions(compare, steadily):
    def scenario(region):
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4)]
        inner = [region(block) for block in blocks]
        pairs = [region(Chain(inner[:2])), region(Chain(inner[2:], 0.5))]
        run = region(Chain(pairs))
        x = torch.randn(3, 4, requires_grad=True)
        for turn in range(6):
            loss = run(x * 1).square().sum()
            if turn == 4:
                blocks[0].eval()
                pairs.reverse()
            loss.backward()
        return [x.grad, *([p.grad for p in block.parameters()] + [dict(block.named_buffers())] for block in blocks)]

    compare(scenario)
    assert steadily["replays"] > 0


def block():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2))


class Holding:
    """No module; one of its attributes is."""

    def __init__(self, module):
        self.module = module

    def forward(self, x):
        return self.module(x) * 2


HELD = {
    "attribute": lambda module: Holding(module).forward,
    "list": lambda module: Chain([module]),
    "whole and part": lambda module: Chain([module, module[1]]),
    "part and whole": lambda module: Chain([module[1], module]),
}
CHANGED = {
    "nothing": lambda put, module: None,
    "eval": lambda put, module: module.eval(),
    "parts": lambda put, module: module.append(nn.Sigmoid()),
    "exchanged": lambda put, module: put(block()),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("held", HELD)
def test_modules_that_a_callable_holds(compare, held, change):
    """One is exchanged before a forward, and what is there then changes before the backward of it."""

    def scenario(region):
        first, other = block(), block()
        target = HELD[held](first)
        owner = getattr(target, "__self__", target)

        def put(module):
            if held == "attribute":
                owner.module = module
            else:
                owner.parts[-1 if held == "part and whole" else 0] = module

        run, x = region(target), torch.randn(3, 4, requires_grad=True)
        for turn in range(WARM + 4):
            if turn == WARM + 1:
                put(other)
            loss = run(x * 1).square().sum()
            if turn == WARM + 1:
                CHANGED[change](put, other)
            loss.backward()
        seen = [[p.grad for p in module.parameters()] + [dict(module.named_buffers())] for module in (first, other)]
        return [x.grad, *seen]

    compare(scenario)


def test_what_wraps_a_region_is_not_that_region(compare):
    """`functools.wraps` makes the wrapper carry what its function carries, and name it as what it wraps."""

    def scenario(region):
        scale = 1.0

        def scaled(x):
            return torch.sin(x * scale)

        inner = region(scaled)

        @functools.wraps(inner)
        def wrapper(x):
            return torch.cos(inner(x) * 3)

        run, x = region(Chain([wrapper])), torch.randn(3, requires_grad=True)
        for turn in range(WARM + 3):
            loss = run(x * 1).square().sum()
            if turn == WARM + 1:
                scale += 1
            loss.backward()
        return x.grad

    compare(scenario)
