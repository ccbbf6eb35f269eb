"""Parameters frozen or unfrozen between forward and backward, or from call to call: what a call saves depends on them.

Shapes are alike here, so that what was saved in one place would pass for what belongs in another.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import lowtide


class Gated(nn.Module):
    """Its calls go the short way once they repeat."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        y = torch.sin(self.first(x))
        return y * torch.cos(self.second(y)) * self.seen(y) + x * 0.1

    def seen(self, y):
        return 0.7


class Remembering(Gated):
    """Has an attribute that changes, so that its calls never do."""

    def __init__(self, width):
        super().__init__(width)
        self.last_seen = None

    def seen(self, y):
        self.last_seen = y.detach() if self.last_seen is None else self.last_seen * 0.5 + y.detach()
        return self.last_seen


def train(model, call, rows, flags):
    """Steps with flags of the two layers in forward and in backward; all gradients."""
    found = []
    layers = [model.first, model.second]
    torch.manual_seed(1)
    for forward, backward in flags:
        for layer, flag in zip(layers, forward, strict=True):
            layer.requires_grad_(flag)
        x = torch.randn(rows, 4, requires_grad=True)
        y = call(x * 1)
        for layer, flag in zip(layers, backward, strict=True):
            layer.requires_grad_(flag)
        model.zero_grad()
        y.square().sum().backward()
        found += [x.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
        assert [p.requires_grad for p in model.parameters()] == [backward[0], backward[0], backward[1]]
    return found


def both_ways(kind, rows, flags):
    torch.manual_seed(0)
    models = [kind(4), kind(4)]
    models[1].load_state_dict(models[0].state_dict())
    plain = train(models[0], models[0], rows, flags)
    return plain, train(models[1], lowtide.checkpoint(models[1]), rows, flags)


def assert_equal(plain, checkpointed):
    for one, other in zip(plain, checkpointed, strict=True):
        assert (one is None) is (other is None)
        assert one is None or one.equal(other)


KINDS = pytest.mark.parametrize("kind", [Gated, Remembering])
ALL, FIRST, SECOND, NONE = (True, True), (True, False), (False, True), (False, False)


@KINDS
@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("calls", range(4))
@pytest.mark.parametrize(("forward", "backward"), [(ALL, NONE), (ALL, FIRST), (FIRST, SECOND), (SECOND, FIRST), (NONE, ALL)])
def test_frozen_between_forward_and_backward(kind, rows, calls, forward, backward):
    assert_equal(*both_ways(kind, rows, [(forward, forward)] * calls + [(forward, backward), (forward, forward)]))


@KINDS
@pytest.mark.parametrize("rows", [3, 4])
def test_trained_in_turn(kind, rows):
    assert_equal(*both_ways(kind, rows, [(FIRST, FIRST), (SECOND, SECOND)] * 4))


@KINDS
@pytest.mark.parametrize("seed", range(10))
def test_any_order(kind, seed):
    draw, kinds = random.Random(seed), [ALL, FIRST, SECOND, NONE]
    flags = []
    for _ in range(9):
        forward = draw.choice(kinds) if not flags or draw.random() < 0.4 else flags[-1][0]
        flags.append((forward, forward if draw.random() < 0.6 else draw.choice(kinds)))
    assert_equal(*both_ways(kind, 4, flags))
