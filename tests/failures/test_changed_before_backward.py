"""What a region reads and that becomes another between its forward and its backward: the replay sees what the forward saw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.settings = {"scale": 3.0}

    def forward(self, x):
        return (self.drop(self.linear(x)) * self.scale * self.settings["scale"]).tanh().exp()


class _Plain:
    def __init__(self):
        self.scale = 2.0


class _Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0

    def tick(self):
        self.count += 1
        return self.count


def _trial(region, fn, spoil):
    """Gradients of a few calls, each of them spoilt before its backward."""
    run, found = region(fn), []
    for turn in range(4):
        torch.manual_seed(turn)
        x = torch.randn(2, 4, requires_grad=True)
        y = run(x)
        spoil(turn)
        y.sum().backward()
        found.append(x.grad)
    return found


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model, turn: setattr(model, "scale", 5.0 + turn),
        lambda model, turn: model.settings.update(scale=5.0 + turn),
        lambda model, turn: setattr(model.drop, "p", 0.1 + turn / 10),
    ],
    ids=["attribute", "dictionary", "dropout"],
)
def test_an_attribute_of_a_module(compare, spoil):
    def scenario(region):
        torch.manual_seed(0)
        model = _Scaled()
        return _trial(region, model, lambda turn: spoil(model, turn)), model.scale, model.settings["scale"], model.drop.p

    compare(scenario)


def test_an_attribute_of_an_ordinary_object(compare):
    def scenario(region):
        thing = _Plain()
        return _trial(region, lambda x: (x * thing.scale).tanh().exp(), lambda turn: setattr(thing, "scale", 5.0 + turn)), thing.scale

    compare(scenario)


def test_an_array(compare):
    def scenario(region):
        array = np.full(4, 2.0, np.float32)
        return _trial(region, lambda x: (x * torch.from_numpy(array)).tanh().exp(), lambda turn: array.fill(5.0 + turn)), array.tolist()

    compare(scenario)


def test_a_default_argument(compare):
    def scenario(region):
        def fn(x, count=[0]):  # noqa: B006
            count[0] += 1
            return (x * count[0]).tanh().exp()

        return _trial(region, fn, lambda turn: None), fn.__defaults__[0]

    compare(scenario)


def test_an_object_with_slots(compare):
    def scenario(region):
        thing = _Slotted()
        return _trial(region, lambda x: (x * thing.tick()).tanh().exp(), lambda turn: None), thing.count

    compare(scenario)


def test_an_object_of_a_type_that_no_earlier_call_of_the_code_met(compare):
    def trial(region):
        class Counter:
            count = 0

            def tick(self):
                self.count += 1
                return self.count

        counter = Counter()
        return _trial(region, lambda x: (x * counter.tick()).tanh().exp(), lambda turn: None), counter.count

    def scenario(region):
        return [trial(region) for _ in range(3)]

    compare(scenario)


def test_gradients_of_a_backward_inside_the_region_are_added_once(compare):
    def scenario(region):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)

        def fn(x):
            layer(x.detach()).sum().backward()
            return layer(x).exp()

        return _trial(region, fn, lambda turn: None), [p.grad.clone() for p in layer.parameters()]

    compare(scenario)
