"""What a region does for the first time in a call that is not watched: right all the same, or an error once and right from then on."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine._call import Call
from lowtide.errors import InputChangedError, ReplayError

TURNS = 8


class _Writes(nn.Module):
    """Writes to something of its own where its second argument says so."""

    def __init__(self, what):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.ones(4))
        self.loose = torch.ones(4)
        self.generator = torch.Generator().manual_seed(3)
        self.what = what

    def forward(self, x, choice):
        if choice.item() > 0:
            x = getattr(self, self.what)(x)
        return torch.exp(torch.sin(self.layer(x.clone()) * self.buffer.clone() * self.loose.clone())).cos()

    def write_buffer(self, x):
        self.buffer.mul_(0.9).add_(x.detach().mean(0))
        return x

    def write_attribute(self, x):
        self.loose.mul_(0.9).add_(x.detach().mean(0))
        return x

    def rebind(self, x):
        self.loose = self.loose * 0.9 + x.detach().mean(0)
        return x

    def write_input(self, x):
        return x.mul_(2)

    def draw(self, x):
        return x * torch.rand(4, generator=self.generator)

    def state(self):
        return [self.buffer.clone(), self.loose.clone(), self.generator.get_state()]


def _turn(run, model, writes):
    model.zero_grad()
    x = torch.randn(3, 4, requires_grad=True)
    run(x * 1, torch.tensor(1 if writes else -1)).sum().backward()
    return [x.grad, model.layer.weight.grad.clone(), *model.state()]


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("what", ["rebind", "draw"])
def test_right_at_once(compare, what, start):
    def scenario(region):
        torch.manual_seed(0)
        model = _Writes(what)
        run = region(model)
        return [_turn(run, model, turn >= start) for turn in range(TURNS)]

    compare(scenario)


@pytest.mark.parametrize("start", [1, 5])
@pytest.mark.parametrize(
    ("what", "error"), [("write_buffer", InputChangedError), ("write_attribute", InputChangedError), ("write_input", ReplayError)]
)
def test_an_error_once_and_right_from_then_on(what, error, start):
    torch.manual_seed(0)
    plain, model = _Writes(what), _Writes(what)
    model.load_state_dict(plain.state_dict())
    run = lowtide.checkpoint(model)
    for turn in range(TURNS):
        torch.manual_seed(turn)
        expected = _turn(plain, plain, turn >= start)
        torch.manual_seed(turn)
        if turn == start:
            with pytest.raises(error):
                _turn(run, model, writes=True)
            assert all(map(torch.equal, model.state(), expected[2:]))  # written to once, as in the plain run
        else:
            assert all(map(torch.equal, _turn(run, model, turn >= start), expected))


@pytest.mark.parametrize("form", ["function", "module"])
def test_an_op_on_a_list_writes_to_a_saved_tensor(form):
    def fn(x):
        y = torch.exp(x)
        z = torch.sin(y)
        torch._foreach_mul_([y], 2.0)
        return z.cos()

    run = lowtide.checkpoint(fn if form == "function" else type("Module", (nn.Module,), {"forward": lambda _, x: fn(x)})())
    for call in (fn, run, run, run):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(torch.randn(3, requires_grad=True)).sum().backward()


class _Holder:
    def __init__(self):
        self.tensor = torch.ones(4)
        self.count = 0


def _replaces(holder):
    holder.tensor = holder.tensor * 1.5


def _writes(holder):
    holder.tensor.mul_(1.5)


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.parametrize("change", [_replaces, _writes], ids=["replaced", "written to"])
def test_a_tensor_of_an_object_that_a_region_inside_another_changes(compare, change, start):
    def scenario(region):
        kind = type("Holder", (_Holder,), {})  # a type of its own: what is known of types is kept
        holder = kind()

        def inner(x, held, changes):
            if changes:
                change(held)
                held.count += 1
            return torch.sin(x * held.tensor.clone()).exp()

        def outer(x, changes):
            y = torch.tanh(x) * holder.tensor.clone()
            return torch.exp(torch.sin(region(inner)(region(inner)(y, holder, changes), holder, changes) * holder.tensor.clone())).cos()

        for fn in (inner, outer):  # and code of its own, for what is known of code is kept as well
            fn.__code__ = fn.__code__.replace(co_name=f"{fn.__name__}, {change.__name__} from {start}")
        run, seen = region(outer), []
        for turn in range(TURNS):
            x = torch.randn(3, 4, requires_grad=True)
            run(x, turn >= start).sum().backward()
            seen.append((x.grad, holder.tensor.clone(), holder.count))
        return seen

    compare(scenario)


class _Slotted:
    __slots__ = ("count", "tensor")

    def __init__(self):
        self.count, self.tensor = 1, torch.ones(4)


def _plain_object():
    holder = _Holder()
    holder.count = 1
    return holder


_OBJECTS = {
    "slots": _Slotted,
    "attributes": _plain_object,
    "namespace": lambda: types.SimpleNamespace(count=1, tensor=torch.ones(4)),
}


def _counting(held):
    def fn(x, counts):
        if counts:
            held.count += 1
            held.tensor = held.tensor * 1.1
        return torch.exp(torch.sin(x * held.count * held.tensor)).cos()

    return fn


@pytest.mark.parametrize("kind", _OBJECTS)
def test_code_that_was_watched_with_another_object(compare, kind):
    def scenario(region):
        seen = []
        for start in (0, 1, 5):
            held = _OBJECTS[kind]()
            run = region(_counting(held))
            for turn in range(TURNS):
                x = torch.randn(3, 4, requires_grad=True)
                run(x, turn >= start).sum().backward()
                seen.append((x.grad, held.count, held.tensor))
        return seen

    compare(scenario)


class _Count(nn.Module):
    """Writes to a buffer and reads it."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3) if norm else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return (x if self.norm is None else self.norm(x)) + self.n


class _Node:
    """A region of the same code as those inside it."""

    def __init__(self, region: Any, layer: nn.Module, inside: Sequence[Any] = ()) -> None:
        self.layer, self.inside, self.run = layer, inside, region(self.body)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x).sin()
        for node in self.inside:
            x = node.run(x)
        return x.sin()


def _siblings(region: Any, count: nn.Module) -> _Node:
    return _Node(region, nn.Identity(), [_Node(region, nn.Identity()), _Node(region, count)])


def _deeper(region: Any, count: nn.Module) -> _Node:
    return _Node(region, nn.Identity(), [_Node(region, nn.Identity()), _Node(region, nn.Identity(), [_Node(region, count)])])


def _both(region: Any, count: nn.Module) -> _Node:
    return _Node(region, count, [_Node(region, nn.Identity()), _Node(region, count), _Node(region, count)])


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("tree", [_siblings, _deeper, _both])
def test_regions_of_one_code_around_each_other(tree, norm):
    """The audit of one is not one of its sibling: what that writes to is seen by the audit around both."""
    torch.manual_seed(0)
    found = []
    for region in (lambda fn: fn, lowtide.checkpoint):
        count = _Count(norm=norm)
        node, steps = tree(region, count), []
        for step in range(4):
            x = torch.linspace(step, 1, 12).view(4, 3).requires_grad_()
            y = node.run(x)
            gradients = torch.autograd.grad(y.square().sum(), [x, *count.parameters()])
            steps += [y.detach(), *gradients, *(buffer.clone() for buffer in count.buffers())]
        found.append(steps)
    assert all(map(torch.equal, *found))


def test_what_nobody_saw_being_written_is_an_error(monkeypatch):
    """A buffer was taken as it is, and only then it was learned that calls write to it: there is nothing left to replay from."""
    monkeypatch.setattr(Call, "about_to_write", lambda call, key: None)
    node = _siblings(lowtide.checkpoint, _Count())
    loss = node.run(torch.ones(4, 3, requires_grad=True)).sum()
    with pytest.raises(InputChangedError, match="'n'"):
        loss.backward()
