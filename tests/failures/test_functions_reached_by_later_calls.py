"""What functions read that a region reaches: the first call of its code is watched, and later calls reach others of the same kind."""

from __future__ import annotations

import functools
import types

import pytest
import torch

import lowtide

CALLS = 4


class Wrapped:
    """What a decorator that is a class makes of a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, y):
        return self.function(y)


class Scaling:
    def __init__(self, scale):
        self.scale = scale

    def scaled(self, y):
        return torch.sin(y) * self.scale


def wrapped_by_a_class(w, scale):
    @Wrapped
    def scaled(y):
        return torch.sin(y) * scale

    return lambda y: torch.tanh(scaled(y) @ w)


def attribute_of_the_function(w, scale):
    def region(y):
        return torch.tanh((torch.sin(y) * region.scale) @ w)

    region.scale = scale
    return region


def attribute_of_a_function_that_it_calls(w, scale):
    def scaled(y):
        return torch.sin(y) * scaled.scale

    scaled.scale = scale
    return lambda y: torch.tanh(scaled(y) @ w)


def function_that_calls_itself_in_an_object(w, scale):
    def scaled(y, times=2):
        return scaled(torch.sin(y) * scale, times - 1) if times else y

    held = Wrapped(scaled)
    return lambda y: torch.tanh(held(y) @ w)


def partial_in_an_object(w, scale):
    held = Wrapped(functools.partial(torch.mul, scale))
    return lambda y: torch.tanh(held(torch.sin(y)) @ w)


def method_in_an_object(w, scale):
    held = Wrapped(Scaling(scale).scaled)
    return lambda y: torch.tanh(held(y) @ w)


def function_in_a_list_in_an_object(w, scale):
    held = Wrapped([lambda y: torch.sin(y) * scale])
    return lambda y: torch.tanh(held.function[0](y) @ w)


def object_in_an_object(w, scale):
    held = Wrapped(Wrapped(lambda y: torch.sin(y) * scale))
    return lambda y: torch.tanh(held(y) @ w)


KINDS = [
    wrapped_by_a_class,
    attribute_of_the_function,
    attribute_of_a_function_that_it_calls,
    function_that_calls_itself_in_an_object,
    partial_in_an_object,
    method_in_an_object,
    function_in_a_list_in_an_object,
    object_in_an_object,
]


def called(made, x):
    return torch.autograd.grad(made(x).square().sum(), x)[0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("changed", range(CALLS))
def test_a_tensor_that_is_changed_before_backward_is_an_error_in_every_call(kind, changed):
    for call in range(CALLS):
        w, scale, x = torch.randn(4, 4), torch.full((4,), 2.0), torch.randn(4, 4, requires_grad=True)
        plain = called(kind(w, scale), x)
        out = lowtide.checkpoint(kind(w, scale))(x)
        if call == changed:
            scale.add_(1)
            with pytest.raises(lowtide.InputChangedError):
                out.square().sum().backward()
        else:
            out.square().sum().backward()
            assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("changed", range(CALLS))
def test_another_value_in_an_attribute_of_the_function_is_none_of_the_replay(changed):
    for call in range(CALLS):
        w, x = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        region = attribute_of_the_function(w, torch.full((4,), 2.0))
        plain = called(region, x)
        out = lowtide.checkpoint(region)(x)
        if call == changed:
            region.scale = torch.full((4,), 3.0)
        out.square().sum().backward()
        assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("changed", range(CALLS))
def test_another_variable_of_a_function_in_an_object_is_none_of_the_replay(changed):
    for call in range(CALLS):
        w, x = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
        scale = torch.full((4,), 2.0)
        held = Wrapped(lambda y: torch.sin(y) * scale)  # noqa: B023 – what is tested

        def region(y):
            return torch.tanh(held(y) @ w)  # noqa: B023

        plain = called(region, x)
        out = lowtide.checkpoint(region)(x)
        if call == changed:
            scale = torch.full((4,), 3.0)
        out.square().sum().backward()
        assert torch.equal(x.grad, plain)


def test_what_the_replay_counts_in_an_attribute_of_the_function_ends_as_after_one_forward():
    def region(y):
        region.count += 1
        return torch.tanh(y) * region.count

    region.count = 0
    for call in range(CALLS):
        x = torch.randn(4, requires_grad=True)
        out = lowtide.checkpoint(region)(x)
        out.sum().backward()
        assert region.count == call + 1
        plain = torch.autograd.grad((torch.tanh(x) * (call + 1)).sum(), x)[0]
        assert torch.equal(x.grad, plain)


class Asked:
    """Has what the engine's own containers and tensors are known by, and raises where it is asked for anything else."""

    parts = 3
    tensor = 4

    def __getattr__(self, name):
        raise RuntimeError(f"asked for {name}")


MODULE = types.ModuleType("module")
MODULE.parts, MODULE.tensor = 3, 4


@pytest.mark.parametrize("other", [Asked(), MODULE, torch.distributed], ids=["object", "module", "library"])
@pytest.mark.parametrize("direct", [True, False])
def test_what_a_function_in_an_object_reads_may_be_anything(other, direct):
    w = torch.randn(4, 4, requires_grad=True)

    def scaled(y):
        return torch.sin(y) * len(str(type(other)))

    region = scaled if direct else Wrapped(scaled)
    checkpointed = lowtide.checkpoint(lambda y: torch.tanh(region(y) @ w))
    for _ in range(CALLS):
        x = torch.randn(3, 4, requires_grad=True)
        (gradient,) = torch.autograd.grad(checkpointed(x).sum(), x)
        assert gradient.equal(*torch.autograd.grad(torch.tanh(region(x) @ w).sum(), x))
