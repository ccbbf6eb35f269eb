"""Regions in regions, gradients of gradients, backwards inside of regions, and groups of backwards."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.utils.checkpoint import CheckpointError


def _wraps(api):
    def region(fn):
        return lambda *args: api.checkpoint(fn, *args, use_reentrant=False)

    def gradient(fn):
        def of(x):
            with torch.enable_grad():
                return torch.autograd.grad(fn(x), x, create_graph=True)[0]

        return of

    return region, gradient


def _smooth(x):
    return torch.sin(torch.exp(torch.sin(x)))


def _takes_gradients(x):
    a, b = _smooth(x), _smooth(x)
    torch.autograd.grad(a, x)
    torch.autograd.grad(b, x)
    return torch.sin(x)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("fn", [_smooth, _takes_gradients])
def test_regions_and_gradients_in_every_order(api, early_stop, fn):
    c, g = _wraps(api)
    same = [
        (fn, [c(fn), c(c(fn))]),
        (g(fn), [g(c(fn)), g(c(c(fn)))]),
        (g(g(fn)), [g(c(g(fn))), c(g(g(c(fn)))), g(c(g(c(fn))))]),
        (g(g(g(fn))), [g(c(g(g(c(fn))))), g(c(g(c(g(c(fn))))))]),
    ]
    x = torch.tensor(0.7, requires_grad=True)
    with api.set_checkpoint_early_stop(early_stop):
        for expected, others in same:
            for other in others:
                torch.testing.assert_close(other(x), expected(x))


@pytest.mark.parametrize("early_stop", [True, False])
def test_siblings_in_a_region(api, early_stop):
    c, g = _wraps(api)

    def one(x):
        return torch.sin(torch.exp(torch.sin(x)))

    def two(x):
        return torch.exp(torch.sin(torch.cos(x)))

    def total(fn):
        return lambda x: fn(x).sum()

    def plain(x):
        return two(one(x))

    def nested(x):
        return c(two)(c(one)(x))

    x = torch.randn(3, requires_grad=True)
    with api.set_checkpoint_early_stop(early_stop):
        torch.testing.assert_close(g(total(g(total(c(nested)))))(x), g(total(g(total(plain))))(x))
        torch.testing.assert_close(g(total(c(g(total(c(nested))))))(x), g(total(g(total(plain))))(x))


def test_an_inner_region_holds_its_input_through_the_outer_one(api):
    runs = []

    def inner(x):
        runs.append("inner")
        return torch.sin(torch.sin(x))

    def outer(x):
        runs.append("outer")
        return torch.sin(api.checkpoint(inner, torch.sin(x), use_reentrant=False))

    api.checkpoint(outer, torch.ones(3, requires_grad=True), use_reentrant=False).sum().backward()
    assert runs == ["outer", "inner", "outer", "inner", "inner"]


@pytest.mark.parametrize("grouped", [True, False])
def test_a_group_replays_once_for_backwards_over_disjoint_parts(api, grouped):
    runs = [0]

    def fn(x):
        runs[0] += 1
        middle = torch.cos(torch.sin(x))
        return middle, torch.cos(torch.sin(middle))

    x = torch.randn(3, requires_grad=True)
    middle, out = api.checkpoint(fn, x, use_reentrant=False)
    with api.GraphExecGroup() if grouped else contextlib.nullcontext():
        (grad,) = torch.autograd.grad(out, middle, torch.ones(3))
        (grad,) = torch.autograd.grad(middle, x, grad)
    assert runs == [2 if grouped else 3]
    y = x.detach().requires_grad_()
    torch.testing.assert_close(grad, torch.autograd.grad(fn(y)[1].sum(), y)[0])


def test_backwards_in_a_group_must_not_overlap(api):
    out = api.checkpoint(lambda x: torch.cos(torch.sin(x)), torch.randn(3, requires_grad=True), use_reentrant=False)
    with api.GraphExecGroup():
        out.sum().backward(retain_graph=True)
        with pytest.raises(CheckpointError, match="two backward calls that overlap"):
            out.sum().backward(retain_graph=True)
    out.sum().backward()


def test_groups_do_not_nest(api):
    with api.GraphExecGroup(), pytest.raises(RuntimeError, match="cannot be nested"), api.GraphExecGroup():
        pass


def test_partial_backwards(api):
    def fn(x):
        return torch.sin(torch.exp(x)), torch.cos(torch.exp(torch.sin(x)))

    x = torch.randn(3, requires_grad=True)
    one, two = api.checkpoint(fn, x, use_reentrant=False)
    plain_one, plain_two = fn(x)
    for got, expected in ((one, plain_one), (two, plain_two), (one, plain_one)):
        grad = torch.autograd.grad(got.sum(), x, retain_graph=True)[0]
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), x, retain_graph=True)[0])
