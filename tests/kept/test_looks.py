"""Functions are looked at where watched runs called one that is kept, and all along once one was called elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import lowtide
from lowtide.engine import checkpoint
from lowtide.engine._kept._finding import Finder
from lowtide.engine._kept._looks import looks_of, met_while_looking

from .conftest import Choose, assert_same, costly, costly_calls, function, snapshot

LINEAR, OTHER = 7, 8


def test_places_are_counted_in_marks():
    trail = ("sin", LINEAR, "linear", ~LINEAR, "sin", OTHER, "kept", ~OTHER, LINEAR, "kept", ~LINEAR, "kept")
    assert looks_of([trail], {"kept", "linear"}, {LINEAR}, {LINEAR}) == {2, 4}
    assert looks_of([trail], {"kept", "linear"}, {LINEAR}, set()) == {1, 2, 3, 4}
    assert looks_of([trail], {"kept"}, {LINEAR, OTHER}, {LINEAR}) == {3, 6}
    assert looks_of([trail, ("kept",)], {"kept"}, set(), set()) == {0}
    assert met_while_looking([trail], {2}, {LINEAR}) == {OTHER, ~OTHER, LINEAR}


class Block(nn.Module):
    """The call that is kept lies between two linear layers; ``way`` has it called elsewhere as well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.way = ""

    def forward(self, x):
        x = torch.exp(torch.sin(x) * torch.cos(x))
        if self.way == "before":
            x = costly(x)
        x = self.up(x)
        if self.way == "other mode":
            with Passing():
                x = self.down(torch.sin(x))
        x = costly(torch.sin(x))
        x = self.down.forward(x) if self.way == "called by hand" else self.down(x)
        if self.way == "after":
            x = costly(torch.sin(x))
        return self.norm(torch.exp(torch.tanh(x)))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def steps(run, count=4):
    found = []
    for _ in range(count):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        loss = run(x * 1).square().sum()
        loss.backward()
        found.append(snapshot([loss, x.grad]))
    return found


RULE = Choose(lambda site: costly_calls(site) or function("linear")(site))


@pytest.fixture
def seen(monkeypatch):
    found, tell = [], Finder.__torch_function__

    def see(self, func, types, args=(), kwargs=None):
        found.append(func.__name__)
        return tell(self, func, types, args, kwargs)

    monkeypatch.setattr(Finder, "__torch_function__", see)
    return found


def test_nothing_else_is_looked_at(seen, runs):
    expected = steps(Block())
    run = checkpoint(Block(), policy=RULE)
    assert_same(steps(run), expected)
    seen.clear()
    runs[0] = 0
    assert_same(steps(run, 1), expected[:1])
    assert [name for name in seen if "costly" not in name] == ["sin"] * 2
    assert runs[0] == 1


@pytest.mark.parametrize("way", ["before", "after", "called by hand", "other mode"])
def test_a_run_that_calls_it_elsewhere(runs, way):
    """The first such run may recompute what the policy keeps; those after it do not."""
    block, plain = Block(), Block()
    run = checkpoint(block, policy=RULE)
    assert_same(steps(run), steps(plain))
    block.way = plain.way = way
    expected = steps(plain)
    assert_same(steps(run), expected)
    runs[0] = 0
    assert_same(steps(run), expected)
    assert runs[0] == 4 * (2 if way in ("before", "after") else 1)


def test_in_a_hook_of_a_layer(runs):
    def made():
        block = Block()
        block.up.register_forward_pre_hook(lambda part, args: (costly(torch.sin(args[0])),))
        return block

    run = checkpoint(made(), policy=RULE)
    assert_same(steps(run), steps(made()))
    runs[0] = 0
    steps(run)
    assert runs[0] == 4 * 2


def test_modes_of_the_user_stay_what_they_were():
    def fn(x):
        x = layer(x)
        mode = Passing()
        mode.__enter__()
        x = costly(layer(x))
        x = layer(x)
        mode.__exit__(None, None, None)
        assert not any(isinstance(other, Passing) for other in torch.overrides._get_current_function_mode_stack())
        return torch.exp(costly(torch.sin(layer(x))))

    layer = nn.Linear(4, 4)
    run = lowtide.engine.checkpoint(fn, policy=RULE)
    assert_same(steps(run), steps(fn))
    assert not torch.overrides._get_current_function_mode_stack()


def test_an_error_in_a_layer_leaves_no_mode():
    block = Block()
    run = checkpoint(block, policy=RULE)
    steps(run)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(torch.ones(3, 5, requires_grad=True))
    assert not torch.overrides._get_current_function_mode_stack()
    assert_same(steps(run), steps(Block()))
