"""Plans with regions inside regions: gradients bit for bit, and the peak that the simulation says, byte for byte."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.measure import peak_bytes
from lowtide.plan import Plan, PlannedRegion, simulate, smallest_budget
from lowtide.plan._candidates import candidates
from lowtide.plan._equal import EqualBlocks
from lowtide.plan._index import TraceIndex

BLOCKS = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Subject:
    """A chain of blocks, and its step."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.x = torch.linspace(-2, 2, 512 * 16).reshape(512, 16)

    def step(self) -> None:
        torch.manual_seed(1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.model(self.x).square().sum().backward()

    def gradients(self) -> list[torch.Tensor]:
        self.step()
        return [parameter.grad.clone() for parameter in self.model.parameters()]


def one(i: int) -> PlannedRegion:
    return PlannedRegion((str(i),))


def several(start: int, stop: int, *inside: PlannedRegion) -> PlannedRegion:
    return PlannedRegion(tuple(map(str, range(start, stop))), inside=inside)


PLANS = {
    "blocks in segments": [several(0, 4, *map(one, range(4))), several(4, 8, *map(one, range(4, 8)))],
    "the last of each segment is left": [several(0, 4, *map(one, range(3))), several(4, 7, one(4), one(5))],
    "segments in segments": [several(0, 6, several(0, 2), several(2, 4)), one(6)],
    "three levels": [several(0, 6, several(0, 3, several(0, 2, one(0))), one(3), several(4, 6, one(4))), several(6, 8, one(6))],
    "parts of a block": [several(0, 3, PlannedRegion(("0.norm", "0.up")), PlannedRegion(("1",), inside=(PlannedRegion(("1.drop",)),)))],
}


def planned(trace: lowtide.StepTrace, regions: list[PlannedRegion]) -> Plan:
    return Plan(tuple(regions), trace.fingerprint, 0, 0, 0.0, 0.0, "by hand")


@pytest.mark.parametrize("name", PLANS)
def test_gradients_are_equal_and_the_peak_is_the_simulated_one(name) -> None:
    subject = Subject()
    subject.step()
    plain = subject.gradients()
    trace = lowtide.trace(subject.model, subject.step)
    resident = sum(storage.bytes for storage in trace.storages if storage.resident)
    handle = lowtide.apply(subject.model, planned(trace, PLANS[name]))
    for _ in range(3):
        assert all(map(torch.equal, subject.gradients(), plain))
    assert peak_bytes(subject.step, torch.device("cpu"), resident) == simulate(trace, PLANS[name]).peak_bytes
    with handle.disabled():
        assert peak_bytes(subject.step, torch.device("cpu"), resident) == simulate(trace, None).peak_bytes
    handle.remove()
    assert not any("forward" in module.__dict__ for module in subject.model.modules())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_duplicates_replay_as_well(duplicate) -> None:
    subject = Subject()
    subject.step()
    plain = subject.gradients()
    lowtide.apply(subject.model, planned(lowtide.trace(subject.model, subject.step), PLANS["three levels"]))
    other = Subject(duplicate(subject.model))
    assert all(map(torch.equal, other.gradients(), plain))
    assert all(map(torch.equal, subject.gradients(), plain))


def twice(subject: Subject) -> list[torch.Tensor]:
    """Two backwards over one graph."""
    loss = subject.model(subject.x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return [parameter.grad.clone() for parameter in subject.model.parameters()]


def of_gradients(subject: Subject) -> list[torch.Tensor]:
    """Through a gradient of the input."""
    x = subject.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(subject.model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [parameter.grad.clone() for parameter in subject.model.parameters()]


def compiled(subject: Subject) -> list[torch.Tensor]:
    torch.compile(subject.model, backend="aot_eager")(subject.x).square().sum().backward()
    return [parameter.grad.clone() for parameter in subject.model.parameters()]


@pytest.mark.parametrize("way", [twice, of_gradients, compiled])
def test_other_ways_to_go_backward(way: Callable[[Subject], list[torch.Tensor]]) -> None:
    subject = Subject()
    for module in subject.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    subject.step()
    handle = lowtide.apply(subject.model, planned(lowtide.trace(subject.model, subject.step), PLANS["three levels"]))
    found = []
    for _ in range(2):
        subject.model.zero_grad()
        found.append(way(subject))
    subject.model.zero_grad()
    with handle.disabled():
        plain = way(subject)
    assert all(map(torch.equal, found[0], plain))
    assert all(map(torch.equal, found[1], plain))


def test_every_level_saves_memory_and_takes_time() -> None:
    subject = Subject()
    subject.step()
    trace = lowtide.trace(subject.model, subject.step)
    trace = dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, seconds=1e-3) for op in trace.ops))
    flat, nested = [several(0, 4), several(4, 8)], [several(0, 4, *map(one, range(3))), several(4, 8, *map(one, range(4, 7)))]
    one_level, two_levels = simulate(trace, flat), simulate(trace, nested)
    assert two_levels.peak_bytes < one_level.peak_bytes < simulate(trace, None).peak_bytes
    assert two_levels.added_s > one_level.added_s > 0.0


def test_regions_inside_that_overlap_by_their_calls_are_refused() -> None:
    subject = Subject()
    subject.step()
    trace = lowtide.trace(subject.model, subject.step)
    with pytest.raises(PlanError, match="overlap"):
        simulate(trace, [several(0, 4, one(0)), one(0)])


def with_fixed_times(trace: lowtide.StepTrace) -> lowtide.StepTrace:
    return dataclasses.replace(trace, ops=tuple(dataclasses.replace(op, seconds=1e-3) for op in trace.ops))


def depth(regions: tuple[PlannedRegion, ...]) -> int:
    return max((1 + depth(region.inside) for region in regions), default=0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_the_default_solver_nests_below_what_one_level_reaches(share) -> None:
    subject = Subject()
    subject.step()
    plain = subject.gradients()
    trace = with_fixed_times(lowtide.trace(subject.model, subject.step))
    resident = sum(storage.bytes for storage in trace.storages if storage.resident)
    low = smallest_budget(trace).predicted_peak_bytes
    flat = lowtide.solve(trace, max_slowdown=100.0, solver="constrained-path").predicted_peak_bytes
    plan = lowtide.solve(trace, int(low + share * (flat - 1 - low)))
    assert depth(plan.regions) > 1
    handle = lowtide.apply(subject.model, plan)
    for _ in range(3):
        assert all(map(torch.equal, subject.gradients(), plain))
    assert peak_bytes(subject.step, torch.device("cpu"), resident) == plan.predicted_peak_bytes < flat
    handle.remove()


def test_blocks_that_are_alike_have_the_same_put_inside(monkeypatch) -> None:
    subject = Subject()
    subject.step()
    trace = with_fixed_times(lowtide.trace(subject.model, subject.step))

    def inside_blocks() -> set[PlannedRegion]:
        return {c.region for c in candidates(TraceIndex(trace), nested=True).regions if c.inside and len(c.paths) == 1 and c.paths != ("",)}

    apart = inside_blocks()
    monkeypatch.setattr("lowtide.plan._equal._MANY_CALLS", 0)
    assert EqualBlocks(TraceIndex(trace)).original
    assert inside_blocks() == apart
    assert {region.paths for region in apart} >= {(str(i),) for i in range(BLOCKS)}


class Adding(nn.Module):
    """Linear layers of which all but the first are given another tensor as well, as decoders and rotary embeddings have it.

    Args:
        made_inside: it is what the first of them makes, or one of the last two what the second makes.
    """

    def __init__(self, made_inside: int = 0) -> None:
        super().__init__()
        self.made_inside = made_inside
        self.scale = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Bilinear(16, 16, 16) if i else nn.Linear(16, 16) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = other = self.scale(x)
        for i, block in enumerate(self.blocks):
            x = block(x, other) if i else block(x)
            if i + 1 == self.made_inside:
                other = x
        return x + scaled


ADDING = tuple(f"blocks.{i}" for i in range(4))
RUNS_GIVEN_MORE = {
    "its first half": (PlannedRegion(ADDING, inside=(PlannedRegion(ADDING[:2]),)),),
    "its second half": (PlannedRegion(ADDING, inside=(PlannedRegion(ADDING[2:]),)),),
    "both": (PlannedRegion(ADDING, inside=(PlannedRegion(ADDING[:2]), PlannedRegion(ADDING[2:]))),),
    "three levels": (PlannedRegion(ADDING, inside=(PlannedRegion(ADDING[1:], inside=(PlannedRegion(ADDING[2:]),)),)),),
}


@pytest.mark.parametrize("made_inside", [0, 1, 2])
@pytest.mark.parametrize("regions", RUNS_GIVEN_MORE.values(), ids=list(RUNS_GIVEN_MORE))
def test_runs_inside_a_region_are_given_more_on_their_way(regions, made_inside) -> None:
    subject = Subject(Adding(made_inside))
    subject.step()
    plain = subject.gradients()
    trace = lowtide.trace(subject.model, subject.step)
    resident = sum(storage.bytes for storage in trace.storages if storage.resident)
    lowtide.apply(subject.model, planned(trace, regions))
    for _ in range(3):
        assert all(map(torch.equal, subject.gradients(), plain))
    assert peak_bytes(subject.step, torch.device("cpu"), resident) == simulate(trace, regions).peak_bytes


def test_the_plan_with_the_lowest_peak_may_have_runs_that_are_given_more() -> None:
    subject = Subject(Adding())
    subject.step()
    plain = subject.gradients()
    trace = with_fixed_times(lowtide.trace(subject.model, subject.step))
    resident = sum(storage.bytes for storage in trace.storages if storage.resident)
    plan = smallest_budget(trace)
    lowtide.apply(subject.model, plan)
    for _ in range(3):
        assert all(map(torch.equal, subject.gradients(), plain))
    assert peak_bytes(subject.step, torch.device("cpu"), resident) == plan.predicted_peak_bytes
