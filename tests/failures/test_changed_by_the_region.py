"""State that a region changes itself, wherever it is: a replay starts from what it was, and it ends as after one forward."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn


def _out(x, scale):
    return torch.exp(torch.sin(x * scale)).cos()


class _Property(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = 1.0

    @property
    def level(self):
        return self.hidden

    @level.setter
    def level(self, value):
        self.hidden = value

    def forward(self, x, changes):
        if changes:
            self.level = self.level + 1
        return _out(x, self.level)

    def state(self):
        return self.hidden


class _ByName(_Property):
    def forward(self, x, changes):
        name = "hid" + "den"
        if changes:
            setattr(self, name, getattr(self, name) + 1)
        return _out(x, getattr(self, name))


def _of_class(change):
    class Counts(nn.Module):
        count = 1

        def forward(self, x, changes):
            if changes:
                change(self)
            return _out(x, self.count)

        def state(self):
            return type(self).count

    def by_type(self):
        type(self).count += 1

    def by_class(self):
        self.__class__.count += 1

    def by_variable(self):
        Counts.count += 1

    change = {"type": by_type, "class": by_class, "variable": by_variable}[change]
    return Counts()


class _DefaultOfForward(nn.Module):
    def forward(self, x, changes, seen=[1]):  # noqa: B006
        if changes:
            seen.append(1)
        return _out(x, len(seen))

    def state(self):
        return len(type(self).forward.__defaults__[0])


class _DefaultsOfHelper(nn.Module):
    def __init__(self):
        super().__init__()

        def helper(x, changes, seen=[1], *, more={"n": 1}):  # noqa: B006
            if changes:
                seen.append(1)
                more["n"] += 1
            return _out(x, len(seen) + more["n"])

        self.helper = helper

    def forward(self, x, changes):
        return self.helper(x, changes)

    def state(self):
        return len(self.helper.__defaults__[0]), self.helper.__kwdefaults__["more"]["n"]


def _fresh_default():
    forward = _DefaultOfForward.forward
    defaults = tuple(list(value) for value in forward.__defaults__)
    copy = type(forward)(forward.__code__, forward.__globals__, forward.__name__, defaults, forward.__closure__)
    return type("Fresh", (_DefaultOfForward,), {"forward": copy})()


_MODULES = {
    "property": _Property,
    "attribute by name": _ByName,
    "class, through type()": lambda: _of_class("type"),
    "class, through __class__": lambda: _of_class("class"),
    "class, by a variable": lambda: _of_class("variable"),
    "default argument of forward": _fresh_default,
    "default arguments of a helper": _DefaultsOfHelper,
}


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("kind", _MODULES)
def test_what_a_module_changes_from_a_call_on(compare, kind, start):
    def scenario(region):
        model = _MODULES[kind]()
        run, seen = region(model), []
        for turn in range(8):
            x = torch.randn(3, 4, requires_grad=True)
            run(x, turn >= start).sum().backward()
            seen.append((x.grad, model.state()))
        return seen

    compare(scenario)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_keyword_defaults_of_a_function(compare, start):
    def scenario(region):
        def fn(x, changes, *, seen=[1]):  # noqa: B006
            if changes:
                seen.append(1)
            return _out(x, len(seen))

        run, found = region(fn), []
        for turn in range(8):
            x = torch.randn(3, 4, requires_grad=True)
            run(x, turn >= start).sum().backward()
            found.append((x.grad, len(fn.__kwdefaults__["seen"])))
        return found

    compare(scenario)


def _draw():
    return random.random()


class _Draws(nn.Module):
    def forward(self, x, choice):
        return _out(x, _draw() if choice.item() > 0 else 1.0)


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_branch_that_draws_from_pythons_generator_in_a_helper(compare, start):
    def scenario(region):
        run, seen = region(_Draws()), []
        for turn in range(8):
            x = torch.randn(3, 4, requires_grad=True)
            run(x, torch.tensor(1 if turn >= start else -1)).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)
