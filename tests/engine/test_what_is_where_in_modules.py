"""Something in a module goes elsewhere before backward, or hides what is there: a replay sees what the forward saw, or says so."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.engine import checkpoint
from lowtide.errors import InputChangedError

SIZE = 4
FACTORS = {"one": 2.0, "two": 3.0}


class Block(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm, self.act, self.relu = nn.LayerNorm(SIZE), nn.GELU(), nn.ReLU()
        self.one, self.two = nn.Parameter(torch.rand(SIZE)), nn.Parameter(torch.rand(SIZE))
        self.scale = 2.0
        self.second.gain = 2.0  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.first(x)) * self.scale
        y = torch.sin(self.second(y) * self.second.gain)
        y = self.act(self.norm(y)) * self.one
        return torch.tanh(self.relu(torch.cos(y) * self.two) * FACTORS["one"]) * y


class Paired(Block):
    def __init__(self) -> None:
        super().__init__()
        self.pair = (1.0, [1.5])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.pair[1][0]


def _hand_over(block: Block) -> None:
    del block.scale
    block.other = 2.0  # type: ignore[assignment]


def _exchange_modules(block: Block) -> None:
    first, second = block.first, block.second
    others = {name: module for name, module in block.named_children() if module is not first and module is not second}
    for name in [*block._modules]:
        delattr(block, name)
    second.gain, first.gain = 2.0, 2.0  # type: ignore[assignment]
    block.second, block.first = first, second
    for name, module in others.items():
        setattr(block, name, module)


def _exchange_factors(block: Block) -> None:
    one, two = FACTORS["one"], FACTORS["two"]
    FACTORS.clear()
    FACTORS.update(two=one, one=two)


def _hide_weight(block: Block) -> None:
    vars(block.first)["weight"] = block.second.weight


def _hide_module(block: Block) -> None:
    vars(block)["first"] = block.second


def _hide_parameter(block: Block) -> None:
    vars(block)["one"] = block.two


CHANGES: list[Callable[[Block], object]] = [
    lambda block: delattr(block, "scale"),
    lambda block: setattr(block.norm, "eps", 0.3),
    lambda block: setattr(block.act, "approximate", "tanh"),
    lambda block: setattr(block.second, "gain", 3.0),
    lambda block: setattr(block.relu, "inplace", True),
    *(_hand_over, _exchange_modules, _exchange_factors, _hide_weight, _hide_module, _hide_parameter),
]


def _gradients(
    region: Callable[..., Callable[..., torch.Tensor]], change: Callable[..., object], at: int, kind: type[Block] = Block
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    FACTORS.clear()
    FACTORS.update(one=2.0, two=3.0)
    block = kind()
    called, parameters, found = region(block), [*block.parameters()], []
    for step in range(at + 2):
        x = torch.randn(3, SIZE, requires_grad=True)
        y = called(x * 1)
        if step == at:
            change(block)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters], allow_unused=True)]
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("change", CHANGES, ids=[*map(str, range(len(CHANGES)))])
def test_a_replay_sees_what_its_forward_saw(monkeypatch: pytest.MonkeyPatch, change: Callable[[Block], object], at: int) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    _assert_same(change, at, Block)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_list_in_a_tuple_is_what_it_was(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    _assert_same(lambda block: block.pair[1].append(block.pair[1].pop() * 2), at, Paired)


def _assert_same(change: Callable[..., object], at: int, kind: type[Block]) -> None:
    plain, checkpointed = (_gradients(region, change, at, kind) for region in (lambda module: module, checkpoint))
    assert len(plain) == len(checkpointed)
    for one, other in zip(plain, checkpointed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_parameters_that_exchanged_their_names_are_an_error(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    def exchange(block: Block) -> None:
        one, two = block.one, block.two
        del block.one, block.two
        block.two, block.one = one, two

    with pytest.raises(InputChangedError, match="under the names that they had"):
        _gradients(checkpoint, exchange, at)


def test_parameters_may_exchange_their_names_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    found = []
    for region in (lambda module: module, checkpoint):
        torch.manual_seed(1)
        block = Block()
        called, parameters = region(block), [*block.parameters()]
        for _ in range(12):
            x = torch.randn(3, SIZE, requires_grad=True)
            found.append(torch.autograd.grad(called(x * 1).square().sum(), [x, *parameters]))
            one, two = block.one, block.two
            del block.one, block.two
            block.two, block.one = one, two
    for plain, other in zip(found[:12], found[12:], strict=True):
        assert all(map(torch.equal, plain, other))


@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.parametrize("at", [1, 5])
def test_a_region_in_a_region_has_the_hooks_of_its_forward(monkeypatch: pytest.MonkeyPatch, at: int, removed: bool) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    class Around(nn.Module):
        def __init__(self, region: Callable[..., Callable[..., torch.Tensor]]) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.Tanh())
            self.called = region(self.inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(self.called(torch.cos(x)))

    found = []
    for region in (lambda module: module, checkpoint):
        torch.manual_seed(1)
        around = Around(region)
        called = region(around)
        for step in range(at + 1):
            x = torch.randn(3, SIZE, requires_grad=True)
            before = around.inner[0].register_forward_hook(lambda _, __, y: y * 1.5) if step == at and removed else None
            y = called(x * 1)
            if before is not None:
                before.remove()
            elif step == at:
                around.inner[0].register_forward_hook(lambda _, __, y: y * 1.5)
            found.append(torch.autograd.grad(y.square().sum(), [x, *around.parameters()]))
    for plain, other in zip(found[: at + 1], found[at + 1 :], strict=True):
        assert all(map(torch.equal, plain, other))
