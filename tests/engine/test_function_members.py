"""Calls of functions between modules as members of regions: what the step computes stays what it was, bit for bit."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide.engine import FunctionMember, RegionHandle, install
from lowtide.errors import AlreadyAppliedError
from lowtide.measure import peak_bytes

CAT = "torch._VariableFunctionsClass.cat"
SILU, RELU, DROP, SOFTMAX = (f"torch.nn.functional.{name}" for name in ("silu", "relu", "dropout", "softmax"))


class Stage(nn.Module):
    """Functions between modules; one works in place, one draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.up(x)), inplace=True)
        return F.silu(self.down(F.dropout(hidden, 0.5)))


class Meeting(nn.Module):
    """What is made early is read late, by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Stage(), Stage(), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        return self.last(torch.cat([early, self.second(early)], dim=1))


class Subject:
    """A model with its step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Meeting()
        self.x = torch.randn(256, 16)

    def step(self, model: nn.Module | None = None) -> list[torch.Tensor]:
        """Loss, gradients and buffers."""
        model = self.model if model is None else model
        torch.manual_seed(1)
        for buffer in model.buffers():
            buffer.zero_()
        model.zero_grad()
        loss = model(self.x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]

    def members(self, *paths: str) -> list[tuple[str, nn.Module | FunctionMember]]:
        modules = dict(self.model.named_modules())
        return [(path, _member(modules, path)) for path in paths]

    def install(self, *regions: tuple[str, ...]) -> list[RegionHandle]:
        return [install(self.members(*paths), around=True) for paths in regions]


def _member(modules: dict[str, nn.Module], path: str) -> nn.Module | FunctionMember:
    caller, colon, name = path.partition(":")
    return FunctionMember(modules[caller], {"cat": CAT, "silu": SILU, "relu": RELU, "drop": DROP}[name], 0) if colon else modules[path]


REGIONS = {
    "a function alone": [("first:silu",)],
    "one in front": [(":cat", "last")],
    "one between": [("first.norm", "first:relu", "first:drop", "first.down")],
    "one that draws in front": [("first:drop", "first.down")],
    "one at the end": [("second.down", "second:silu")],
    "two regions of one module": [("first.norm", "first:relu"), ("first:drop", "first.down", "first:silu")],
    "blocks with what is between them": [("second", ":cat", "last")],
    "regions inside": [("first.norm", "first:relu"), ("first:drop", "first.down"), ("first", "second", ":cat", "last")],
    "the same call inside and around": [(":cat", "last"), ("second", ":cat", "last")],
    "three levels": [("second.norm", "second:relu"), ("second",), ("second", ":cat"), ("first", "second", ":cat", "last")],
    "the module that calls them": [("second:drop", "second.down"), ("second",)],
}


@pytest.mark.parametrize("name", REGIONS)
def test_the_step_computes_the_same(name: str) -> None:
    subject = Subject()
    plain = subject.step()
    handles = subject.install(*REGIONS[name])
    for _ in range(4):
        assert all(map(torch.equal, subject.step(), plain))
    for handle in handles:
        handle.enabled = False
    assert all(map(torch.equal, subject.step(), plain))
    for handle in reversed(handles):
        handle.remove()
    assert all("forward" not in module.__dict__ for module in subject.model.modules())
    assert all(map(torch.equal, subject.step(), plain))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copied", "pickled"])
def test_copies_have_regions_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    subject = Subject()
    plain = subject.step()
    handles = subject.install(("first:drop",), *REGIONS["blocks with what is between them"])
    other = copied(subject.model)
    assert all(map(torch.equal, subject.step(other), plain))
    assert [handle.replay_seconds() for handle in handles] == [0, 0]
    subject.step()
    assert all(handle.replay_seconds() > 0 for handle in handles)


def test_what_a_concatenation_makes_is_held_no_longer() -> None:
    subject = Subject()
    peaks = []
    for regions in ([], [(":cat", "last")]):
        handles = subject.install(*regions)
        subject.step()
        subject.step()
        gc.collect()
        peaks.append(peak_bytes(subject.step, torch.device("cpu"), 0))
        for handle in handles:
            handle.remove()
    made = 256 * 32 * 4
    # Its second input was let go of; the first is saved by the function that made it.
    assert peaks[0] - peaks[1] <= made
    assert peaks[0] >= peaks[1]


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    subject = Subject()
    plain = subject.step()
    subject.install((":cat", "last"), ("first.norm", "first:relu"))
    subject.step()

    def fail(*_: object) -> None:
        raise ValueError("here")

    for place in (subject.model.last, subject.model.first.norm, subject.model.first.down):
        hook = place.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="here"):
            subject.model(subject.x)
        hook.remove()
        assert torch.overrides._get_current_function_mode_stack() == []
        assert all(map(torch.equal, subject.step(), plain))


def test_what_waits_for_a_member_that_never_comes_is_let_go_of() -> None:
    subject = Subject()
    subject.install((":cat", "last"))
    given: list[weakref.ref[torch.UntypedStorage]] = []
    subject.model.second.register_forward_hook(lambda *about: given.append(weakref.ref(about[-1].untyped_storage())))
    subject.step()
    subject.model.last.forward, forward = (lambda x: x.new_zeros(1)), subject.model.last.forward
    subject.model(subject.x)
    subject.model.last.forward = forward
    gc.collect()
    assert given[-1]() is None


def test_nothing_is_held_where_no_gradients_are_recorded() -> None:
    subject = Subject()
    handles = subject.install(("second", ":cat", "last"))
    subject.step()
    before = handles[0].replay_seconds()
    with torch.no_grad():
        subject.model(subject.x)
    assert handles[0].replay_seconds() == before


def test_a_call_that_another_one_has_become_is_replayed_in_its_stead() -> None:
    """The count leads to another call of the function: memory is saved elsewhere, gradients are the same."""
    subject = Subject()
    subject.install((":cat", "last"), ("first:silu",))
    subject.step()
    forward = subject.model.second.forward
    subject.model.second.forward = lambda x: forward(torch.cat([x, x])[: len(x)])
    try:
        found = subject.step()
        for place in (subject.model.first, subject.model):
            place.__dict__.pop("forward")
        assert all(map(torch.equal, found, subject.step()))
    finally:
        del subject.model.second.__dict__["forward"]


class Loop(nn.Module):
    """Calls a function as often as it is told."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.times, self.way = 1, way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(_gate, x, use_reentrant=False) if self.way == "checkpoint" else _gate(x)
        return x


class Looping(nn.Module):
    """A function is called in a block, as often as the step wants it, and after it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.first, self.block, self.head = way, nn.GELU(), Loop(way), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        block = Loop.forward.__get__(self.block) if self.way == "checkpoint" else self.block.forward if self.way == "direct" else self.block
        return self.head(F.softmax(block(hidden), -1))


def _gate(x: torch.Tensor) -> torch.Tensor:
    return F.softmax(x.sin(), -1) * x


def _gradients(model: nn.Module, around: Callable[[], AbstractContextManager[object]] = nullcontext) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(4, 8, requires_grad=True)
    with around():
        loss = model(x).square().sum()
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


@pytest.mark.parametrize(
    ("way", "regions"),
    [
        ("module", [("first", "block", ":softmax")]),
        ("module", [("first", "block"), (":softmax",)]),
        ("module", [("block", ":softmax")]),
        ("module", [("block", ":softmax", "head")]),
        ("direct", [("block",), (":softmax", "head")]),
        ("checkpoint", [(":softmax", "head")]),
    ],
)
def test_a_count_that_leads_into_a_module_or_checkpoint_makes_no_member(way: str, regions: list[tuple[str, ...]]) -> None:
    """What runs the inside again does not count: a region that forward made there would be none in the replay."""
    planned, plain = Looping(way), Looping(way)
    plain.load_state_dict(planned.state_dict())
    modules = dict(planned.named_modules())
    for paths in regions:
        members = [(path, FunctionMember(planned, SOFTMAX, 1) if path == ":softmax" else modules[path]) for path in paths]
        install(members, around=True)
    for times in (1, 1, 2, 2, 1, 3, 3, 0, 2, 1):
        planned.block.times = plain.block.times = times
        assert all(map(torch.equal, _gradients(planned), _gradients(plain))), times


class Frozen(nn.Module):
    """Some steps record no gradients of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.linear, self.last = False, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        with torch.no_grad() if self.frozen else nullcontext():
            gate = F.silu(hidden) @ self.last.weight
        return self.last(hidden * gate)


@pytest.mark.parametrize("paths", [(":silu",), (":silu", "last")], ids=["alone", "with the next"])
def test_a_function_that_a_step_calls_without_gradients_is_called_as_it_is(paths: tuple[str, ...]) -> None:
    planned, plain = Frozen(), Frozen()
    plain.load_state_dict(planned.state_dict())
    install([(path, _member(dict(planned.named_modules()), path)) for path in paths])
    for frozen in (False, False, True, True, False, True):
        planned.frozen = plain.frozen = frozen
        found, wanted = (_gradients(model, torch.autograd.graph.save_on_cpu) for model in (planned, plain))
        assert all(map(torch.equal, found, wanted)), frozen


def test_a_second_region_is_refused_on_a_module_whose_calls_are_members() -> None:
    subject = Subject()
    subject.install(("first.norm", "first:relu"))
    with pytest.raises(AlreadyAppliedError, match="first"):
        install(subject.members("first"))


@pytest.mark.filterwarnings("ignore:torch.compile could not take region")
def test_what_is_compiled_around_runs_as_python() -> None:
    subject = Subject()
    plain = subject.step()
    subject.install(("first.norm", "first:relu"), ("second", ":cat", "last"))
    compiled = torch.compile(subject.model, backend="aot_eager")
    for _ in range(3):
        assert all(map(torch.equal, subject.step(compiled), plain))
