"""What is alive when: a region holds its inputs, a replay's tensors live as long as autograd wants them, and nothing stays."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from lowtide.engine import checkpoint, install, is_replaying


@pytest.fixture(autouse=True)
def without_the_garbage_collector():
    gc.collect()
    checkpoint(torch.sin)(torch.ones(1, requires_grad=True)).backward()  # what is imported then leaves cycles
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Alive:
    """Counts tensors that a function made and that are still alive."""

    def __init__(self):
        self.now = self.most = 0

    def watch(self, tensor):
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(tensor, self.gone)
        return tensor

    def gone(self):
        self.now -= 1


def layers(alive, count=6):
    def run(x):
        for _ in range(count):
            x = alive.watch(torch.sin(x))
        return x

    return run


def test_nothing_of_a_region_is_alive_between_forward_and_backward_but_its_output():
    alive = Alive()
    x = torch.randn(4, requires_grad=True)
    out = checkpoint(layers(alive))(x)
    assert alive.now == 1
    out.sum().backward()
    del out
    assert alive.now == 0


def test_the_most_alive_at_once_is_no_more_than_with_torch():
    def most(wrap):
        alive = Alive()
        h = torch.randn(4, requires_grad=True)
        for _ in range(5):
            h = wrap(layers(alive))(h)
        h.sum().backward()
        return alive.most

    for _ in range(2):
        ours = most(checkpoint)
    assert ours <= most(lambda fn: lambda x: torch_checkpoint(fn, x, use_reentrant=False))


def test_a_graph_that_is_dropped_without_backward_leaves_nothing():
    alive = Alive()
    h = torch.randn(4, requires_grad=True)
    for _ in range(3):
        h = checkpoint(layers(alive))(h)
    del h
    assert alive.now == 0


@pytest.mark.parametrize("retain", [False, True])
def test_partial_backwards_do_not_pile_up(retain):
    alive = Alive()
    x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    fn = checkpoint(lambda a, b: layers(alive, 3)(a) * layers(alive, 3)(b))
    for _ in range(3):
        out = fn(x, y).sum()
    counts = []
    for _ in range(4):
        torch.autograd.grad(out, [x], retain_graph=True)
        counts.append(alive.now)
    if retain:
        assert len(set(counts[1:])) == 1
    del out
    assert alive.now == 0


def test_one_replay_serves_two_backwards_over_one_region():
    counts = []
    count = [0]

    class Probe(nn.Module):
        def forward(self, x):
            if is_replaying():
                count[0] += 1
            return torch.sin(torch.cos(torch.sin(x)))

    run = checkpoint(Probe())
    x = torch.randn(4, requires_grad=True)
    out = run(x)
    first = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    counts.append(count[0])
    second = torch.autograd.grad(out.sum(), x)[0]
    counts.append(count[0])
    assert torch.equal(first, second)
    assert counts == [1, 1]


def test_a_gradient_of_an_early_output_replays_only_what_it_needs():
    ran = []

    class Two(nn.Module):
        def forward(self, x):
            early = torch.sin(torch.cos(x))
            if is_replaying():
                ran.append("early")
            late = torch.tanh(torch.exp(early))
            late = torch.tanh(torch.exp(late))
            if is_replaying():
                ran.append("late")
            return early, late

    run = checkpoint(Two())
    for _ in range(2):
        ran.clear()
        x = torch.randn(4, requires_grad=True)
        early, late = run(x)
        torch.autograd.grad(early.sum(), x, retain_graph=True)
    assert "late" not in ran
    assert torch.autograd.grad(late.sum(), x)[0].abs().sum() > 0


def test_no_gradients_cost_next_to_nothing():
    calls = []
    run = checkpoint(lambda x: calls.append(torch.is_grad_enabled()) or x)
    with torch.no_grad():
        run(torch.ones(1))
    assert calls == [False]


def test_a_chain_that_is_never_differentiated_is_freed_without_recursion():
    h = torch.randn(2, requires_grad=True)
    run = checkpoint(lambda x: torch.sin(torch.sin(x)))
    for _ in range(6000):
        h = run(h)
    del h


def test_a_watched_call_leaves_no_cycles():
    def once():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        install([("model", model)])
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()

    once()  # what is imported or made once
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        once()
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, (torch.Tensor, nn.Module))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
