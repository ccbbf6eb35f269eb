"""Replays that make other calls than their forward did, as code does that asks whether it is replayed: each call gets what is its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import checkpoint, kept_sites

from .conftest import Choose, assert_same, costly, costly_calls, function, module, snapshot

LOGGED = {
    "a constant": lambda act, x: act(torch.ones_like(x)),
    "detached": lambda act, x: act(x.detach()),
    "without gradients": torch.no_grad()(lambda act, x: act(x)),
    "several": lambda act, x: [act(x.detach() * number) for number in range(3)],
}


def act(x):
    return torch.tanh(x)


def steps(fn):
    found = []
    for _ in range(4):
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        loss = fn(x * 1).square().sum()
        loss.backward()
        found.append(snapshot([loss, x.grad]))
    return found


@pytest.mark.parametrize("log", LOGGED.values(), ids=LOGGED)
@pytest.mark.parametrize("in_replay", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("call", [torch.tanh, act])
def test_calls_of_functions(log, in_replay, place, call):
    def fn(x):
        for number, part in enumerate((torch.sin(x), torch.cos(x), torch.exp(x))):
            if number == place and lowtide.is_replaying() == in_replay:
                log(call, x)
            x = x * torch.exp(call(part))
        return x

    assert_same(steps(checkpoint(fn, policy=Choose(function("tanh")))), steps(fn))


class Layers(nn.Module):
    """Calls its layers for a log as well, in the forward alone or in the replay alone."""

    def __init__(self, in_replay):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.in_replay = nn.Linear(4, 4), nn.Linear(4, 4), in_replay

    def forward(self, x):
        with lowtide.original_only() as original:
            if self.in_replay is not None and original != self.in_replay:
                with torch.no_grad():
                    self.second(torch.tanh(self.first(x)))
        return torch.exp(self.second(torch.tanh(self.first(x))))


@pytest.mark.parametrize("in_replay", [True, False])
@pytest.mark.parametrize("rule", [function("linear"), module(nn.Linear), function("linear", "tanh")])
def test_calls_of_modules(in_replay, rule):
    assert_same(steps(checkpoint(Layers(in_replay), policy=Choose(rule))), steps(Layers(in_replay)))


def test_calls_of_hooks_that_run_once():
    def log(part, args, result):
        act(result.detach())

    def made():
        model = Layers(in_replay=True)
        model.first.register_forward_hook(lowtide.once(log))
        return model

    assert_same(steps(checkpoint(made(), policy=Choose(function("linear", "tanh")))), steps(made()))


def test_calls_of_a_hook_that_is_registered_later():
    model, plain = Layers(in_replay=True), Layers(in_replay=True)
    model.in_replay = plain.in_replay = None
    run = checkpoint(model, policy=Choose(function("tanh")))
    assert_same(steps(run), steps(plain))
    for layer in (model.first, plain.first):
        layer.register_forward_pre_hook(lowtide.once(log_first))
    assert_same(steps(run), steps(plain))


def log_first(part, args):
    act(args[0].detach())


def going_backward():
    """What frameworks ask, which know of no ``is_replaying``."""
    return torch._C._current_graph_task_id() != -1


@pytest.mark.parametrize("in_replay", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_calls_from_the_same_line_in_code_that_does_not_ask(in_replay, recorded):
    def fn(x):
        parts = [torch.sin(x), torch.cos(x)]
        if going_backward() == in_replay:
            parts.insert(0, x if recorded else torch.ones_like(x))
        made = []
        for number, part in enumerate(parts):
            with torch.set_grad_enabled(number > 0 or len(parts) == 2):
                made.append(torch.tanh(part))
        return torch.exp(made[-2]) * torch.sin(made[-1])

    assert_same(steps(checkpoint(fn, policy=Choose(function("tanh")))), steps(fn))


def test_calls_of_which_one_comes_too_early():
    def fn(x):
        scales = [torch.full((4,), 0.5), torch.full((4,), 2.0)]
        extra = [torch.zeros(4)] if going_backward() else []
        for scale in [*extra, *scales]:
            factor = torch.tanh(scale)
            if not any(scale is other for other in extra):
                x = torch.sin(x * factor)
        return torch.exp(x)

    assert_same(steps(checkpoint(fn, policy=Choose(function("tanh")))), steps(fn))


def test_code_that_begins_to_ask():
    told = {"log": False}

    def fn(x):
        if told["log"] and not lowtide.is_replaying():
            act(torch.zeros(4))
        return torch.exp(torch.sin(x * act(torch.full((4,), 0.5))) * act(torch.full((4,), 2.0)))

    run = checkpoint(fn, policy=Choose(function("tanh")), audit_every=1000)
    expected = steps(fn)
    for log in (False, True):
        told["log"] = log
        assert_same(steps(run), expected)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@pytest.mark.parametrize("in_replay", [True, False])
def test_calls_of_autograd_functions(in_replay):
    def fn(x):
        if lowtide.is_replaying() == in_replay:
            Doubled.apply(torch.ones_like(x))
        return torch.exp(Doubled.apply(torch.sin(x)) * Doubled.apply(torch.cos(x)))

    assert_same(steps(checkpoint(fn, policy=Choose(lambda site: site.function is Doubled))), steps(fn))


def test_what_is_kept_is_still_not_run_again(runs):
    def fn(x):
        if not lowtide.is_replaying():
            costly(x.detach())
        return torch.exp(torch.tanh(costly(torch.sin(x))) * torch.tanh(costly(torch.cos(x))))

    run = checkpoint(fn, policy=Choose(costly_calls))
    assert_same(steps(run), steps(fn))
    assert len(kept_sites(run)) == 3
    runs[0] = 0
    steps(run)
    assert runs[0] == 4 * 3
