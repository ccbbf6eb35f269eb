"""Where PyTorch's checkpoint is silently wrong, the same call on lowtide's engine is right."""

from __future__ import annotations

import contextvars
import gc
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.torch_compat import checkpoint

_SCALE = contextvars.ContextVar("_SCALE", default=1.0)

forms = pytest.mark.parametrize("use_reentrant", [True, False])


def _same(fn, make, use_reentrant, after=lambda: None):
    results = []
    for region in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        owner = make()
        seen = []
        for _ in range(3):
            x = torch.randn(3, 4, requires_grad=True)
            out = checkpoint(fn, owner, x, use_reentrant=use_reentrant) if region else fn(owner, x)
            after()
            out.square().sum().backward()
            seen.append((out, x.grad))
        state = dict(owner.state_dict()) if isinstance(owner, nn.Module) else {}
        results.append((seen, state))
    (plain, plain_state), (replayed, state) = results
    for one, other in zip(plain, replayed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert all(torch.equal(state[name], value) for name, value in plain_state.items())


@forms
def test_batch_norm_is_updated_once(use_reentrant):
    _same(lambda m, x: m(x), lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()), use_reentrant)


@forms
def test_python_and_numpy_randomness(use_reentrant):
    _same(lambda _, x: torch.sin(x * random.random()) * float(np.random.rand()), lambda: None, use_reentrant)


@forms
def test_rrelu(use_reentrant):
    _same(lambda m, x: F.rrelu(m(x), training=True), lambda: nn.Linear(4, 4), use_reentrant)


@forms
def test_a_context_variable_that_is_gone_by_backward(use_reentrant):
    tokens = []

    def fn(_, x):
        return torch.sin(x * _SCALE.get())

    def run(region):
        x = torch.ones(4, requires_grad=True)
        tokens.append(_SCALE.set(3.0))
        out = checkpoint(fn, None, x, use_reentrant=use_reentrant) if region else fn(None, x)
        _SCALE.reset(tokens.pop())
        out.sum().backward()
        return x.grad

    assert torch.equal(run(region=True), run(region=False))


def test_an_except_clause_does_not_swallow_the_early_stop():
    def fn(x):
        try:
            return torch.sin(torch.exp(x)) + 1
        except Exception:
            return x

    x = torch.ones(3, requires_grad=True)
    checkpoint(fn, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.sin(torch.exp(x)).sum(), x)[0])


def _by_keyword(x, mask):
    return checkpoint(_scaled, x, mask=mask, use_reentrant=False)


def _in_a_list(x, mask):
    return checkpoint(_picked, [x, mask], use_reentrant=False)


@pytest.mark.parametrize("call", [_by_keyword, _in_a_list])
def test_what_is_changed_in_place_is_noticed_wherever_it_was_passed(call):
    mask = torch.rand(4)
    out = call(torch.ones(4, requires_grad=True), mask)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def _scaled(x, mask):
    return torch.sin(x * mask)


def _picked(both):
    return torch.sin(both[0] * both[1])


def test_partial_backwards_do_not_pile_up_replayed_tensors():
    def fn(x):
        return torch.sin(torch.exp(x)), torch.cos(torch.exp(torch.sin(x)))

    x = torch.randn(3, requires_grad=True)
    one, _two = checkpoint(fn, x, use_reentrant=False)

    def alive():
        torch.autograd.grad(one.sum(), x, retain_graph=True)
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    alive()
    before = alive()
    for _ in range(5):
        alive()
    assert alive() <= before


def test_a_bare_except_in_a_loop_does_not_keep_the_replay_from_its_end():
    def fn(x):
        for _ in range(3):
            try:
                y = torch.sin(torch.exp(x))
                break
            except:  # noqa: E722
                continue
        return y

    x = torch.ones(3, requires_grad=True)
    checkpoint(fn, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.sin(torch.exp(x)).sum(), x)[0])


@forms
def test_code_can_tell_a_replay_from_the_forward(use_reentrant):
    seen = []

    def fn(x):
        seen.append(lowtide.is_replaying())
        return torch.sin(torch.exp(x))

    checkpoint(fn, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not lowtide.is_replaying()
