"""A region reads the attributes of an object that is another one now and then, and that changes between forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
from torch import nn


def compute(held, x):
    y = torch.tanh(x * held.scale) * held.weight
    for item in held.items:
        y = y * item + torch.rand(4, generator=held.generator) * y
    return torch.sin(y * held.settings.rate) * held.table["a"]


class Plain:
    def __init__(self):
        self.scale, self.weight, self.items = 2.0, torch.rand(4), [1.5, 2.0]
        self.settings, self.table = types.SimpleNamespace(rate=1.1), {"a": 2.0}
        self.generator = torch.Generator().manual_seed(3)

    def run(self, x):
        return compute(self, x)

    __call__ = run


class Slots:
    __slots__ = ("generator", "items", "scale", "settings", "table", "weight")
    __init__, run, __call__ = Plain.__init__, Plain.run, Plain.run


class Quiet(Plain):
    """Has no generator, and so is of the kind whose calls go the short way."""

    def __init__(self):
        super().__init__()
        del self.generator

    def run(self, x):
        return torch.sin(torch.tanh(x * self.scale) * self.weight * self.settings.rate) * self.table["a"]

    __call__ = run


@dataclasses.dataclass
class Data:
    scale: float = 2.0

    def __post_init__(self):
        Plain.__init__(self)

    run = __call__ = Plain.run


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.held, self.all = None, []

    def forward(self, x):
        for held in self.all:
            x = held.run(x)
        return x if self.held is None else self.held(x)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = None

    def forward(self, x):
        return self.held(x)


class Outer:
    inner = None

    def __call__(self, x):
        return self.inner(x)


def objects(region, kind):
    while True:
        held = kind()
        yield held, region(held)


def methods(region, kind):
    while True:
        held = kind()
        yield held, region(held.run)


def arguments(region, kind):
    run = region(lambda x, held: held(x))
    while True:
        held = kind()
        yield held, lambda x, held=held: run(x, held)


def in_a_list(region, kind):
    def run(x, all_held):
        for held in all_held:
            x = held.run(x)
        return x

    run = region(run)
    while True:
        held = kind()
        yield held, lambda x, held=held: run(x, [held])


def in_a_loop(region, kind):
    def run(x, all_held):
        for held in all_held:
            x = torch.tanh(x * held.scale) * held.weight + torch.rand(4, generator=getattr(held, "generator", None))
        return torch.sin(x * held.settings.rate) * held.table["a"]

    run = region(run)
    while True:
        held = kind()
        yield held, lambda x, held=held: run(x, [held])


def in_an_object(region, kind):
    outer = Outer()
    run = region(outer)
    while True:
        outer.inner = kind()
        yield outer.inner, run


def in_a_closure(region, kind):
    def around(held):
        return region(lambda x: held(x) * 2)

    while True:
        held = kind()
        yield held, around(held)


def in_a_model(region, kind):
    model = Model()
    run = region(model)
    while True:
        model.held = kind()
        yield model.held, run


def in_a_bare_model(region, kind):
    model = Bare()
    run = region(model)
    while True:
        model.held = kind()
        yield model.held, run


def in_a_list_of_a_model(region, kind):
    model = Model()
    run = region(model)
    while True:
        model.all = [kind()]
        yield model.all[0], run


HELD = None


def in_a_global(region, kind):
    global HELD
    run = region(lambda x: HELD(x) * 2)
    while True:
        HELD = held = kind()
        yield held, run


def given_by_a_function(region, kind):
    box = [None]

    def current():
        return box[0]

    run = region(lambda x: current().run(x))
    while True:
        box[0] = held = kind()
        yield held, run


def deep_down(region, kind):
    run = region(lambda x, outer: outer.middle.inner(x))
    while True:
        held = kind()
        outer = types.SimpleNamespace(middle=types.SimpleNamespace(inner=held))
        yield held, lambda x, outer=outer: run(x, outer)


CHANGES = {
    "number": lambda held: setattr(held, "scale", held.scale + 1),
    "longer list": lambda held: held.items.append(3.0),
    "entry of a list": lambda held: held.items.__setitem__(0, 9.0),
    "another list": lambda held: setattr(held, "items", [7.0]),
    "another tensor": lambda held: setattr(held, "weight", torch.ones(4)),
    "tensor in place": lambda held: held.weight.add_(1),
    "drawn": lambda held: torch.rand(3, generator=getattr(held, "generator", None)),
    "another generator": lambda held: hasattr(held, "generator") and setattr(held, "generator", torch.Generator().manual_seed(8)),
    "attribute of an attribute": lambda held: setattr(held.settings, "rate", 5.0),
    "another attribute": lambda held: setattr(held, "settings", types.SimpleNamespace(rate=7.0)),
    "entry of a table": lambda held: held.table.__setitem__("a", 9.0),
    "nothing": lambda held: None,
}
WAYS = (
    *(objects, methods, arguments, in_a_list, in_a_loop, in_an_object, in_a_closure, in_a_model, in_a_bare_model, in_a_list_of_a_model),
    *(in_a_global, given_by_a_function, deep_down),
)


def gradient(loss, x):
    """Of the loss, or that there is none for something was written to in place."""
    try:
        loss.backward()
    except RuntimeError as error:
        return "modified" if "modified by an inplace operation" in str(error) else repr(error)
    return x.grad


def train(region, way, kind):
    """What is written in place is an error without regions too: of those that depend on it, nothing but the error is compared."""
    seen = []
    for change in CHANGES.values():
        given = way(region, kind)
        for number in range(3):
            held, run = next(given)
            for turn in range(2 if number == 1 else 6):
                x = torch.randn(3, 4, requires_grad=True)
                loss = run(x * 1).square().sum()
                if turn in (0, 5) or (number and turn % 2 == number % 2):
                    change(held)
                seen += [gradient(loss, x), torch.get_rng_state()]
                if kind is not Quiet:
                    seen.append(held.generator.get_state())
    return seen


@pytest.mark.parametrize("kind", [Plain, Slots, Quiet, Data])
@pytest.mark.parametrize("way", WAYS)
def test_objects_are_as_they_were(compare, way, kind):
    compare(functools.partial(train, way=way, kind=kind))


class Listed(nn.Module):
    """Keeps tensors in lists, and in a list of its own objects."""

    def __init__(self):
        super().__init__()
        self.linear, self.weights = nn.Linear(4, 4), [torch.rand(4)]

    def forward(self, x):
        for weight in self.weights:
            x = torch.sin(self.linear(x) * weight)
        return x


class ListedOutside:
    def __init__(self):
        self.weights = [torch.rand(4)]

    def __call__(self, x):
        for weight in self.weights:
            x = torch.sin(x * weight)
        return x


class Counting(nn.Module):
    """Writes to a tensor in a list itself, as plain autograd allows."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), [torch.zeros(4)]

    def forward(self, x):
        with torch.no_grad():
            self.seen[0].add_(x.mean(0))
        return torch.sin(self.linear(x)) * self.seen[0].clone()


class CountingOutside:
    def __init__(self):
        self.seen = [torch.zeros(4)]

    def __call__(self, x):
        with torch.no_grad():
            self.seen[0].add_(x.mean(0))
        return torch.sin(x) * self.seen[0].clone()


@pytest.mark.parametrize("kind", [Listed, ListedOutside])
def test_a_tensor_in_a_list_that_is_written_to_before_backward_is_an_error(compare, kind):
    def scenario(region):
        held = kind()
        run, seen = region(held), []
        for turn in range(6):
            x = torch.randn(3, 4, requires_grad=True)
            loss = run(x * 1).square().sum()
            if turn > 3:
                held.weights[0].add_(1)
            seen.append(gradient(loss, x))
        return seen

    compare(scenario)


@pytest.mark.parametrize("kind", [Counting, CountingOutside])
def test_a_tensor_in_a_list_that_the_region_writes_to_is_no_error(compare, kind):
    def scenario(region):
        held = kind()
        run, seen = region(held), []
        for _ in range(6):
            x = torch.randn(3, 4, requires_grad=True)
            run(x * 1).square().sum().backward()
            seen += [x.grad, held.seen[0].clone()]
        return seen

    compare(scenario)
