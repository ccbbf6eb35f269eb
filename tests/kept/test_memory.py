"""What is alive when results are kept: they, and nothing else; not twice; and no longer than they are needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.engine import checkpoint

from .conftest import Choose, everything, function, module


@pytest.fixture(autouse=True)
def without_the_garbage_collector():
    checkpoint(torch.sin)(torch.ones(1, requires_grad=True))  # the first dispatch mode of a process imports what leaves cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Alive:
    """The bytes of memory that a function made and that is still there."""

    def __init__(self):
        self.storages = {}

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = weakref.ref(storage), storage.nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(size for ref, size in self.storages.values() if ref() is not None)


def _frame_of(y):
    saved = [getattr(y, name) for name in dir(y) if name.startswith("_raw_saved")]
    found = [value.data.frame for value in saved if hasattr(getattr(value, "data", None), "frame")]
    return next(iter(found), None) or next(filter(None, (_frame_of(child) for child, _ in y.next_functions if child is not None)), None)


def _second(fn, rule, x=None):
    """The output of a second call, from which on results are kept."""
    run = checkpoint(fn, policy=Choose(rule))
    for _ in range(2):
        y = run((torch.randn(8, 4, requires_grad=True) if x is None else x) * 1)
    return y


def test_between_forward_and_backward_there_are_the_kept_results_alone():
    alive = Alive()

    def fn(x):
        h = alive.watch(torch.cos(x))
        y = alive.watch(F.gelu(h))
        return torch.exp(alive.watch(torch.tanh(alive.watch(torch.sin(y)))))

    y = _second(fn, function("gelu"))
    assert alive.bytes == 8 * 4 * 4
    y.sum().backward()
    del y
    assert alive.bytes == 0


def test_arguments_of_a_kept_call_are_not_held():
    alive, linear = Alive(), nn.Linear(64, 4)

    def fn(x):
        return torch.tanh(torch.sin(linear(alive.watch(torch.cos(x)))))

    y = _second(fn, function("linear"), torch.randn(8, 64, requires_grad=True))
    assert alive.bytes == 0
    y.sum().backward()


def test_nor_are_the_casts_that_autocast_makes_of_them():
    linear = nn.Linear(64, 4)

    def fn(x):
        return torch.tanh(torch.sin(linear(torch.cos(x)).float()))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = _second(fn, function("linear"), torch.randn(8, 64, requires_grad=True))
    frame = _frame_of(y.grad_fn)
    slots = [slot for slot in (ref() for ref in frame.slots if ref is not None) if slot is not None]
    assert [tensor.dtype for tensor in frame.held[1:] if tensor is not None] == [torch.bfloat16]
    assert [slot.value for slot in slots] == [None] * len(slots)
    y.sum().backward()


def test_a_result_that_the_region_returns_is_not_held_twice():
    kept = []

    def fn(x):
        y = torch.sin(torch.cos(x))
        kept.append(y.data_ptr())
        return y, torch.tanh(y * 2)

    y, _ = _second(fn, function("sin"))
    frame = _frame_of(y.grad_fn)
    held = [tensor for tensor in frame.held[1:] if tensor is not None]
    assert [tensor.data_ptr() for tensor in held] == [y.data_ptr()] == kept[-1:]


def test_a_result_after_which_nothing_is_made_again_is_not_held():
    y = _second(lambda x: torch.sin(torch.cos(x)), function("sin"))
    assert _frame_of(y.grad_fn).held[1:] == [None]


@pytest.mark.parametrize("rule", [everything, module(nn.Linear), module(nn.Sequential)])
def test_nothing_is_left_of_a_backward_or_a_graph_that_is_dropped(rule):
    alive = Alive()

    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

        def forward(self, x):
            return torch.tanh(torch.sin(alive.watch(self.layers(alive.watch(torch.cos(x))))))

    whole = Whole()
    run = checkpoint(whole, policy=Choose(rule))
    for backward in (True, True, False, True, False):
        y = run(torch.randn(8, 4, requires_grad=True) * 1)
        if backward:
            y.sum().backward()
        del y
        assert alive.bytes == 0


def test_what_a_replay_had_is_let_go_of_unless_the_graph_is_left():
    for retain in (False, True):
        y = _second(lambda x: torch.exp(torch.tanh(torch.sin(torch.cos(x)))), function("sin"))
        frame = _frame_of(y.grad_fn)
        y.sum().backward(retain_graph=retain)
        assert (frame.held[1] is not None) is retain


def test_no_more_than_plain_where_everything_is_kept():
    def bytes_alive(call):
        alive = Alive()

        def fn(x):
            for _ in range(4):
                x = alive.watch(F.gelu(alive.watch(F.linear(x, weight))))
            return x

        run, x = call(fn), torch.randn(8, 4, requires_grad=True)
        for _ in range(3):
            y = run(x * 1)
        assert y is not None
        return alive.bytes

    weight = torch.randn(4, 4, requires_grad=True)
    assert bytes_alive(lambda fn: checkpoint(fn, policy=Choose(everything))) <= bytes_alive(lambda fn: fn)
