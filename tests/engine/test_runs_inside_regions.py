"""Regions of several modules inside others, where later modules are given something that the first was not."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.engine import Options, install
from lowtide.records import Decision

SIZE, COUNT = 8, 4
ALL = range(COUNT)
NESTS: dict[str, list[Sequence[int]]] = {
    "a run in a run": [ALL, ALL],
    "three deep": [ALL, ALL, ALL],
    "its middle": [range(1, 3), ALL],
    "its end": [range(2, 4), ALL],
    "halves of halves": [range(2), range(2, 4), ALL, ALL],
    "around single ones": [[0], [1], [2], [3], range(1, 3), range(1, 4), ALL],
}
"""Members of each region, innermost first."""


class Block(nn.Module):
    """Takes what it is given besides its input by name or by place; dropout makes it draw."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *late: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(self.norm(x))
        for other in (*late, *(() if more is None else (more,))):
            y = y * other.sigmoid() + torch.tanh(other)
        return x + self.dropout(nn.functional.gelu(y))


class Writing(Block):
    """Writes to what it is given."""

    def forward(self, x: torch.Tensor, *late: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        y = super().forward(x, *late, more=more)
        for other in late:
            other.mul_(0.5)
        return y


class Chain(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3, SIZE))
        self.first = nn.Linear(SIZE, SIZE)
        self.blocks = nn.ModuleList(kind() for _ in range(COUNT))

    def forward(self, x: torch.Tensor, late: Callable[[Chain, torch.Tensor, int], Any], around: Callable[[], Any]) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            given = late(self, x, index)
            with around():
                x = block(x, **given) if isinstance(given, dict) else block(x, *given)
        return x


LATE: dict[str, Callable[[Chain, torch.Tensor, int], Any]] = {
    "without gradients": lambda chain, _, i: (torch.full((3, SIZE), float(i)),),
    "a parameter": lambda chain, _, i: (chain.scale,) if i else (),
    "made of a parameter": lambda chain, _, i: (chain.scale.exp(),) if i else (),
    "by name": lambda chain, _, i: {"more": chain.scale * i} if i % 2 else {},
    "views": lambda chain, _, i: torch.stack([chain.scale, chain.scale + 1]).unbind(0)[: i % 3],
    "views of a parameter": lambda chain, _, i: (chain.scale[1:2],) if i > 1 else (),
    "made of what came before": lambda chain, x, i: (x * 1.5, x) if i else (),
}


def gradients(
    chain: Chain,
    late: Callable[[Chain, torch.Tensor, int], Any],
    *,
    around: Callable[[], Any] = contextlib.nullcontext,
    backward: Callable[[torch.Tensor, torch.Tensor], None] = lambda out, _: out.square().sum().backward(),
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    chain.zero_grad()
    x = torch.randn(3, SIZE, requires_grad=True)
    out = chain(x, late, around)
    backward(out, x)
    return [t for t in (out.detach(), x.grad, *(p.grad for p in chain.parameters())) if t is not None]


def check(chain: Chain, nest: list[Sequence[int]], step: Callable[[], list[torch.Tensor]], **options: Any) -> None:
    """Steps of the chain with these regions, the first watched and later ones on what was learned, are those without any."""
    plain = step()
    for members in nest:
        install([(str(i), chain.blocks[i]) for i in members], Options(**options), around=True)
    for _ in range(4):
        seen = step()
        assert len(seen) == len(plain)
        assert all(map(torch.equal, seen, plain))


@pytest.fixture
def chain() -> Chain:
    torch.manual_seed(0)
    return Chain()


@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
@pytest.mark.parametrize("late", LATE.values(), ids=list(LATE))
def test_gradients_are_those_without_regions(chain, nest, late):
    check(chain, nest, lambda: gradients(chain, late))


@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
def test_what_is_written_to_is_as_it_was(nest):
    torch.manual_seed(0)
    chain = Chain(Writing)
    check(chain, nest, lambda: gradients(chain, lambda *_: (torch.ones(3, SIZE),)))


def twice(out: torch.Tensor, x: torch.Tensor) -> None:
    out.square().sum().backward(retain_graph=True)
    out.sum().backward()


def of_gradients(out: torch.Tensor, x: torch.Tensor) -> None:
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize("backward", [twice, of_gradients])
@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
def test_backward_may_run_again(chain, nest, backward):
    check(chain, nest, lambda: gradients(chain, LATE["made of a parameter"], backward=backward))


class Moving(torch.autograd.graph.saved_tensors_hooks):
    """Holds copies, and gives back no others than its own."""

    def __init__(self) -> None:
        own: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> int:
            own.append(torch.empty_like(tensor).copy_(tensor.detach()))
            return len(own) - 1 + (id(own) << 16)

        def unpack(number: int) -> torch.Tensor:
            assert number >> 16 == id(own)
            return own[number & 0xFFFF]

        super().__init__(pack, unpack)


@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
def test_under_hooks_of_others_around_each_module(chain, nest):
    check(chain, nest, lambda: gradients(chain, LATE["made of a parameter"], around=Moving))


@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
def test_under_hooks_of_others_around_all(chain, nest):
    def step() -> list[torch.Tensor]:
        with Moving():
            return gradients(chain, LATE["made of a parameter"])

    check(chain, nest, step)


class KeepingLinear:
    """Keeps what linear layers return."""

    def decide(self, site: Any) -> Decision:
        return Decision.KEEP if "linear" in str(site) else Decision.RECOMPUTE


@pytest.mark.parametrize("late", ["without gradients", "made of a parameter"])
@pytest.mark.parametrize("nest", NESTS.values(), ids=list(NESTS))
def test_regions_that_keep_results(chain, nest, late):
    # What was learned in the first step is left aside by the later modules of a region that was entered before.
    check(chain, nest, lambda: gradients(chain, LATE[late]), policy=KeepingLinear())


@pytest.mark.parametrize("nest", [NESTS["a run in a run"], NESTS["halves of halves"]], ids=["a run in a run", "halves of halves"])
def test_values_are_checked(chain, nest):
    check(chain, nest, lambda: gradients(chain, LATE["made of what came before"]), check_values=True)


class Around(nn.Module):
    """Makes something, and gives it to the module inside it before what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Bilinear(SIZE, SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x, x.cos())


def test_a_run_across_regions_that_are_apart_joins_nothing():
    # Joined, the module inside would hand less to the region around it than in the replay of that alone: tensors would change places.
    torch.manual_seed(0)
    model = nn.Sequential(*(Around() for _ in range(3)))
    x = torch.randn(3, SIZE, requires_grad=True)
    grads = []
    for step in range(5):
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters())])
        if step == 0:
            install([(f"{i}.inside", module.inside) for i, module in enumerate(model)])
            for i, module in enumerate(model):
                install([(str(i), module)])
    assert all(all(map(torch.equal, seen, grads[0])) for seen in grads)


@pytest.mark.parametrize("late", ["without gradients", "made of a parameter", "made of what came before"])
def test_modules_whose_regions_are_apart_are_no_run(chain, late):
    # Each of those around is replayed alone: inside it, its module joins nothing, and is handed what it was handed in forward.
    check(chain, [ALL, [1], [2], [3]], lambda: gradients(chain, LATE[late]))


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


SAVING_NOTHING: dict[str, Callable[[], nn.Module]] = {
    "identity": nn.Identity,
    "times two": Double,
    "flatten": nn.Flatten,
    "dropout that is off in some steps": nn.Dropout,
}
NESTS_AT_THE_SECOND: dict[str, list[Sequence[int]]] = {
    "two deep": [range(1, 3)],
    "two deep, all": [range(1, 5)],
    "three deep": [range(1, 3), range(1, 5)],
    "three deep, the same ones": [range(1, 5), range(1, 5)],
    "three deep, one before": [range(1, 3), range(4)],
}
"""Members of each region inside that around all of them, innermost first."""


@pytest.mark.parametrize("nest", NESTS_AT_THE_SECOND.values(), ids=list(NESTS_AT_THE_SECOND))
@pytest.mark.parametrize("kind", SAVING_NOTHING.values(), ids=list(SAVING_NOTHING))
def test_a_first_module_that_saves_nothing_is_joined_as_in_the_replay_around(kind, nest):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(SIZE, SIZE), nn.Sequential(nn.Tanh(), kind(), nn.Sigmoid(), kind(), nn.Tanh()), nn.Linear(SIZE, SIZE))
    model = copy.deepcopy(plain)
    for members in nest:
        install([(f"1.{i}", model[1][i]) for i in members], around=True)
    install([("1", model[1])], around=True)

    def step(module: nn.Module, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        module.train(seed not in (2, 3, 6))
        module.zero_grad()
        x = torch.randn(3, SIZE, requires_grad=True)
        module(x).square().sum().backward()
        return [t for t in (x.grad, *(p.grad for p in module.parameters())) if t is not None]

    for seed in range(8):
        seen, wanted = step(model, seed), step(plain, seed)
        assert len(seen) == len(wanted) == 5
        assert all(map(torch.equal, seen, wanted))


def test_what_saves_nothing_is_held_no_longer_than_its_result():
    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    packed: list[weakref.ref[Packed]] = []

    def pack(tensor: torch.Tensor) -> Packed:
        result = Packed(tensor)
        packed.append(weakref.ref(result))
        return result

    first, second = Double(), nn.Tanh()
    install([("first", first), ("second", second)])
    for _ in range(3):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p.tensor):
            result = first(torch.randn(3, SIZE, requires_grad=True))
        assert [ref() is not None for ref in packed] == [True]
        del result  # the second module is not called
        assert [ref() is not None for ref in packed] == [False]


@pytest.mark.parametrize("nest", [NESTS["three deep"], NESTS["halves of halves"]], ids=["three deep", "halves of halves"])
def test_compiled(chain, nest):
    compiled = torch.compile(chain, backend="aot_eager")

    def step() -> list[torch.Tensor]:
        torch.manual_seed(1)
        chain.zero_grad()
        x = torch.randn(3, SIZE, requires_grad=True)
        compiled(x, LATE["made of a parameter"], contextlib.nullcontext).square().sum().backward()
        return [t for t in (x.grad, *(p.grad for p in chain.parameters())) if t is not None]

    for block in chain.blocks:
        block.dropout.p = 0.0
    plain = step()
    for members in nest:
        install([(str(i), chain.blocks[i]) for i in members], around=True)
    torch.compiler.reset()
    for _ in range(3):
        assert all(map(torch.equal, step(), plain))
