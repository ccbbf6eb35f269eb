"""A replay that failed leaves nothing behind: a later backward over the same graph finds it replayed anew, or fails as well."""

from __future__ import annotations

import types
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine._guards import _modules
from lowtide.engine._profile import profile_of


class _File:
    """State that no guard can see: it is read as a file is."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def write(self, value: float) -> None:
        self.path.write_text(str(value))

    def read(self) -> float:
        return float(self.path.read_text())


@pytest.fixture
def hidden(tmp_path):
    return _File(tmp_path / "factor")


class _Hiding(nn.Module):
    """Reads a file; its calls go the short way once they repeat."""

    def __init__(self, hidden: _File, how: str) -> None:
        super().__init__()
        self.path, self.how = str(hidden.path), how

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with open(self.path) as file:
            factor = float(file.read())
        first = (x * factor).sin()
        second = first.exp().cos()
        if factor > 1 and self.how == "another way":
            second = second.view(-1, 1).exp().sum(1)
        if factor > 1 and self.how == "error":
            raise ValueError("from inside")
        if factor > 1 and self.how == "interrupt":
            raise KeyboardInterrupt
        return first.tanh(), second.exp().exp()


def _function(module: nn.Module) -> Any:
    """The same as a function with a variable of its own: its calls go the long way."""

    def body(x: torch.Tensor) -> Any:
        return module(x)

    return body


@pytest.mark.parametrize("how", ["another way", "error", "interrupt"])
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("short", [True, False])
def test_what_it_made_is_made_again(hidden, how, calls_before, short):
    body = _Hiding(hidden, how)
    run = lowtide.checkpoint(body if short else _function(body))
    hidden.write(0.5)
    for _ in range(calls_before):
        sum(out.sum() for out in run(torch.randn(6, requires_grad=True))).backward()
    x = torch.randn(6, requires_grad=True)
    first, second = run(x)
    assert (profile_of(body).steady is not None) is short
    expected = torch.autograd.grad(body(x)[0].sum(), x)[0]
    hidden.write(2.0)
    error = {"another way": lowtide.ReplayMismatchError, "error": ValueError, "interrupt": KeyboardInterrupt}[how]
    with pytest.raises(error):
        torch.autograd.grad(second.sum(), x, retain_graph=True)
    hidden.write(0.5)
    assert torch.equal(torch.autograd.grad(first.sum(), x, retain_graph=True)[0], expected)


def test_one_that_stands_in_another_region(hidden):
    body = _Hiding(hidden, "another way")

    def around(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = inner(x * 2)
        return first.exp(), second

    inner = lowtide.checkpoint(body)
    run = lowtide.checkpoint(around)
    hidden.write(0.5)
    for _ in range(3):
        sum(out.sum() for out in run(torch.randn(6, requires_grad=True))).backward()
    x = torch.randn(6, requires_grad=True)
    first, second = run(x)
    expected = torch.autograd.grad(body(x * 2)[0].exp().sum(), x)[0]
    hidden.write(2.0)
    with pytest.raises(lowtide.ReplayMismatchError):
        torch.autograd.grad(second.sum(), x, retain_graph=True)
    hidden.write(0.5)
    assert torch.equal(torch.autograd.grad(first.sum(), x, retain_graph=True)[0], expected)


class _Averages(nn.Module):
    """Writes to two buffers that it reads, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        self.scale.mul_(0.9).add_(x.detach().abs().mean(0))
        return torch.tanh(nn.functional.dropout(self.linear(x)) * self.mean * self.scale)


@pytest.mark.parametrize("failing", range(1, 5))
@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("of_both", [False, True])
def test_one_that_has_no_memory_for_copies_leaves_buffers_and_random_state_alone(failing, calls_before, of_both, monkeypatch):
    first, second = _Averages(), _Averages()
    run = lowtide.checkpoint((lambda x: second(first(x))) if of_both else nn.Sequential(first, second))
    for _ in range(calls_before):
        run(torch.randn(5, 4)).sum().backward()
    loss = run(torch.randn(5, 4)).sum()
    buffers = [*first.buffers(), *second.buffers()]
    values, drawn, made = [buffer.clone() for buffer in buffers], torch.get_rng_state(), 0
    writable_copy = _modules.writable_copy

    def running_out(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal made
        made += 1
        if made == failing:
            raise torch.OutOfMemoryError("there is no memory")
        return writable_copy(tensor)

    monkeypatch.setattr(_modules, "writable_copy", running_out)
    with pytest.raises(torch.OutOfMemoryError, match="there is no memory"):
        loss.backward()
    assert all(now is then for now, then in zip([*first.buffers(), *second.buffers()], buffers, strict=True))
    assert all(map(torch.equal, buffers, values))
    assert torch.equal(torch.get_rng_state(), drawn)


class _Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 3), torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).sin().exp()


def _double(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


@pytest.mark.parametrize("calls_before", [0, 4])
def test_hooks_stay_where_parameters_are_missing(calls_before):
    """The replay would take away a hook that was registered since, and finds one parameter too many."""
    module = _Hooked()
    run = lowtide.checkpoint(module)
    for _ in range(calls_before):
        run(torch.randn(2, 3, requires_grad=True)).sum().backward()
    loss = run(torch.randn(2, 3, requires_grad=True)).sum()
    module.linear.register_forward_hook(_double)
    module.linear.register_parameter("late", nn.Parameter(torch.zeros(1)))
    with pytest.raises(lowtide.LowtideError):
        loss.backward()
    assert [*module.linear._forward_hooks.values()] == [_double]
    assert [*module.linear._parameters] == ["weight", "bias", "late"]


class _Closing(type):
    """Of a class whose attribute cannot be set back."""

    closed = False

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "factor" and _Closing.closed:
            raise AttributeError("closed")
        super().__setattr__(name, value)


class _First:
    factor = 3.0


class _Second(metaclass=_Closing):
    factor = 2.0


def test_what_was_put_elsewhere_is_put_back_where_an_attribute_refuses(monkeypatch):
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * _First.factor).exp() * _Second.factor

    run = lowtide.checkpoint(body)
    for _ in range(3):
        run(torch.randn(3, requires_grad=True)).sum().backward()
    loss = run(torch.randn(3, requires_grad=True)).sum()
    monkeypatch.setattr(_First, "factor", 5.0)
    monkeypatch.setattr(_Second, "factor", 7.0)
    with monkeypatch.context() as patch:
        patch.setattr(_Closing, "closed", True)
        with pytest.raises(AttributeError, match="closed"):
            loss.backward()
    assert (_First.factor, _Second.factor) == (5.0, 7.0)


class _Settings(nn.Module):
    """Reads settings of its own and a tensor elsewhere, which its calls write to."""

    def __init__(self, elsewhere: types.SimpleNamespace) -> None:
        super().__init__()
        self.elsewhere, self.count, self.rate = elsewhere, torch.zeros(3), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.elsewhere.seen.add_(1)
        return (x * self.rate + self.count + self.elsewhere.seen).sin().exp()


def test_what_is_there_stays_where_memory_runs_out_for_copies(monkeypatch):
    elsewhere = types.SimpleNamespace(seen=torch.zeros(3))
    module = _Settings(elsewhere)
    run = lowtide.checkpoint(module)
    for _ in range(3):
        run(torch.randn(3, requires_grad=True)).sum().backward()
    x = torch.randn(3, requires_grad=True)
    loss = run(x).sum()
    inside = x.detach() * 0.5 + module.count + elsewhere.seen
    expected = inside.sin().exp() * inside.cos() * 0.5
    module.rate = 9.0
    there = module.count, elsewhere.seen, module.count.clone(), elsewhere.seen.clone()
    clone = torch.Tensor.clone
    left = [0]

    def failing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] == -1:
            raise MemoryError
        return clone(tensor, *args, **kwargs)

    for copies in range(4):
        left[0] = copies
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", failing)
            with suppress(MemoryError):
                torch.autograd.grad(loss, x, retain_graph=True)
        assert module.count is there[0]
        assert elsewhere.seen is there[1]
        assert module.count.equal(there[2])
        assert elsewhere.seen.equal(there[3])
        assert module.rate == 9.0
    assert torch.allclose(torch.autograd.grad(loss, x)[0], expected)
