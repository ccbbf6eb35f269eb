"""A tensor that a region reads is written to in place between forward and backward: an error, as it is without regions."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn

ELSEWHERE = {"tensor": torch.ones(4)}
TENSOR = torch.ones(4)


class Reads(nn.Module):
    """Keeps a tensor wherever one can be, and multiplies by one of them at the end, or on the way."""

    def __init__(self, place, last):
        super().__init__()
        self.place, self.last = place, last
        self.register_buffer("buffer", torch.rand(4))
        self.attribute = torch.rand(4)
        self.all, self.named = [torch.rand(4)], {"one": {"two": torch.rand(4)}}
        self.held = types.SimpleNamespace(tensor=torch.rand(4), all=(torch.rand(4),))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.trained = nn.Parameter(torch.rand(4))

    def tensor(self):
        return {
            "buffer": self.buffer,
            "attribute": self.attribute,
            "list": self.all[0],
            "table in a table": self.named["one"]["two"],
            "object": self.held.tensor,
            "tuple of an object": self.held.all[0],
            "frozen parameter": self.frozen,
            "trained parameter": self.trained,
            "global": TENSOR,
            "table elsewhere": ELSEWHERE["tensor"],
        }[self.place]

    def forward(self, x):
        x = torch.sin(x) * self.tensor()
        return x if self.last else torch.cos(x)


PLACES = (
    *("buffer", "attribute", "list", "table in a table", "object", "tuple of an object", "frozen parameter", "trained parameter"),
    *("global", "table elsewhere"),
)


def train(region, make):
    """In the first steps nobody writes; then one step in two."""
    run, tensor = make(region)
    seen = []
    for turn in range(7):
        x = torch.randn(3, 4, requires_grad=True)
        loss = run(x * 1).sum()
        if turn > 2 and turn % 2:
            with torch.no_grad():
                tensor.add_(1)
        try:
            loss.backward()
        except RuntimeError as error:
            seen.append("modified" if "modified by an inplace operation" in str(error) else repr(error))
        else:
            seen.append(x.grad)
    return seen


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_of_a_module(compare, place, last):
    def make(region):
        TENSOR.fill_(1)
        ELSEWHERE["tensor"].fill_(1)
        module = Reads(place, last)
        return region(module), module.tensor()

    compare(functools.partial(train, make=make))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("given", ["closure", "list in a closure", "argument", "list", "object", "keyword"])
def test_of_a_function(compare, given, last):
    def multiply(x, tensor):
        x = torch.sin(x) * tensor
        return x if last else torch.cos(x)

    def make(region):
        tensor = torch.rand(4)
        held, names = [tensor], types.SimpleNamespace(tensor=tensor)
        ways = {
            "closure": lambda: region(lambda x: multiply(x, tensor)),
            "list in a closure": lambda: region(lambda x: multiply(x, held[0])),
            "argument": lambda: functools.partial(region(multiply), tensor=tensor),
            "list": lambda: functools.partial(region(lambda x, held: multiply(x, held[0])), held=held),
            "object": lambda: functools.partial(region(lambda x, names: multiply(x, names.tensor)), names=names),
            "keyword": lambda: functools.partial(region(lambda x, *, tensor: multiply(x, tensor)), tensor=tensor),
        }
        return ways[given](), tensor

    compare(functools.partial(train, make=make))
