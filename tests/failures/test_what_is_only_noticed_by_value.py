"""Changes between forward and backward that no cheap check sees, as docs/how-it-works.md lists them: ``check_values`` finds each."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import InputChangedError, ReplayMismatchError


class Scale:
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).square()


def _other(self: Scale, x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x).square()


class Case:
    """A region, what it is called with, and what is changed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer, self.aside, self.scale = nn.Linear(4, 4), nn.Linear(4, 4), Scale()
        self.x = torch.randn(3, 4)
        away = weakref.ref(self.aside)
        layer, scale = self.layer, self.scale
        self.regions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "an input": lambda x: scale.apply(layer(x)),
            "what shares memory with an input": lambda x: scale.apply(layer(x)),
            "a bias": lambda x: scale.apply(layer(x)),
            "a function of a class": lambda x: scale.apply(layer(x)),
            "a tensor of a module that is reached weakly": lambda x: scale.apply(layer(x) * away().bias.detach()),
        }

    def change(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        if what == "an input":
            self.x.data.mul_(2)
        elif what == "what shares memory with an input":
            self.x.numpy()[:] *= 2
        elif what == "a bias":
            self.layer.bias.data.add_(1)
        elif what == "a function of a class":
            monkeypatch.setattr(Scale, "apply", _other)
        else:
            with torch.no_grad():
                self.aside.bias.add_(1)


@pytest.mark.parametrize("what", Case().regions)
def test_a_change_that_only_values_show_is_an_error_where_they_are_checked(what, monkeypatch):
    case = Case()
    run = lowtide.checkpoint(case.regions[what], check_values=True)
    for _ in range(3):
        run(case.x).sum().backward()
    out = run(case.x).sum()
    case.change(what, monkeypatch)
    with pytest.raises((InputChangedError, ReplayMismatchError)):
        out.backward()


def test_an_attribute_of_a_function_is_read_as_it_was():
    layer = nn.Linear(4, 4)

    def act(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * act.scale).square()

    act.scale = 1.0
    grads = []
    for run in (lambda x: act(layer(x)), lowtide.checkpoint(lambda x: act(layer(x)))):
        for _ in range(3):
            act.scale = 1.0
            layer.zero_grad()
            out = run(torch.ones(3, 4)).sum()
            act.scale = 2.0
            out.backward()
        grads.append(layer.weight.grad)
    assert torch.equal(*grads)
