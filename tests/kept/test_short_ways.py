"""Calls that go the way of the call before are taken down in fewer steps; what is kept and what comes out is the same."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.engine import checkpoint
from lowtide.engine._steady import SteadyCall

from .conftest import Choose, assert_same, costly, costly_calls, function, snapshot


class Block(nn.Module):
    """Two linear layers, a norm, and a call that counts its runs."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.one, self.two, self.last = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4), last

    def forward(self, x):
        x = self.two(F.gelu(self.one(self.norm(x))))
        return costly(torch.tanh(x)) if self.last else torch.exp(costly(torch.tanh(x)) * 0.1)


def _steps(block, run, count=4):
    found = []
    for _ in range(count):
        block.zero_grad()
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        run(x * 1).square().sum().backward()
        found.append(snapshot([x.grad, *(p.grad for p in block.parameters())]))
    return found


def test_replays_of_modules_with_a_policy_take_the_short_way(runs, monkeypatch):
    taken, whole = [], SteadyCall.replay
    monkeypatch.setattr(SteadyCall, "replay", lambda self, *args: taken.append(whole(self, *args)) or taken[-1])
    block = Block()
    expected = _steps(block, block)
    run = checkpoint(block, policy=Choose(lambda site: costly_calls(site) or function("linear")(site)))
    _steps(block, run, 2)
    taken.clear()
    assert_same(_steps(block, run), expected)
    assert taken == [True] * 4


def test_a_last_call_whose_result_nobody_asks_for_ends_the_replay(runs):
    block = Block(last=True)
    expected = _steps(block, block)
    run = checkpoint(block, policy=Choose(costly_calls))
    _steps(block, run, 2)
    before = runs[0]
    assert_same(_steps(block, run), expected)
    assert runs[0] - before == 4


def test_attributes_that_hide_the_parameters_of_a_linear_layer_are_used(runs):
    def steps(region):
        block = Block()
        run, found = region(block), []
        for scale in (None, None, None, 2.0, 3.0):
            if scale is not None:
                block.one.__dict__["weight"] = block.one._parameters["weight"].detach() * scale
            found.append(_steps(block, run, 1))
        return found

    kept = steps(lambda block: checkpoint(block, policy=Choose(function("linear", "tanh"))))
    assert_same(kept, steps(lambda block: block))


def test_a_second_backward_over_what_was_kept(runs):
    def steps(run, block):
        found = []
        for _ in range(4):
            block.zero_grad()
            x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
            loss = run(x * 1).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
            found.append(snapshot([x.grad, *(p.grad for p in block.parameters())]))
        return found

    block = Block()
    expected = steps(block, block)
    run = checkpoint(block, policy=Choose(lambda site: costly_calls(site) or function("linear")(site)))
    before = runs[0]
    assert_same(steps(run, block), expected)
    assert runs[0] - before <= 3 + 3  # the first step watches, and keeps nothing


def test_the_first_call_of_a_region_does_not_import_the_compiler():
    code = """
import sys, torch
from torch import nn
from lowtide.engine import checkpoint
run = checkpoint(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
run(torch.ones(1, 2, requires_grad=True)).sum().backward()
print("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
