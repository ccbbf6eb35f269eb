"""Regions of several modules, and regions inside regions: in a graph they save what they save in Python."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import install
from lowtide.plan import KeptCall, Plan, PlannedRegion
from lowtide.policy._fingerprint import fingerprint

from ._models import WIDTH, Block, kept_bytes, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")
LINEAR = "torch._C._nn.linear"
ROW = 8 * WIDTH * 4
"""Bytes of what one block hands to the next."""


def several(start: int, stop: int, *inside: PlannedRegion, kept: tuple[KeptCall, ...] = ()) -> PlannedRegion:
    return PlannedRegion(tuple(map(str, range(start, stop))), kept=kept, inside=inside)


UPS = KeptCall("0.up", LINEAR, 0), KeptCall("2.up", LINEAR, 0)
PLANS = {
    "two of two": [several(0, 2), several(2, 4)],
    "all four": [several(0, 4)],
    "three, then one": [several(0, 3), several(3, 4)],
    "all four, with calls that are kept": [several(0, 4, kept=UPS)],
    "two of two inside one": [several(0, 4, several(0, 2, several(0, 1)), several(2, 4))],
}


def check_equal(model: nn.Module, plain: nn.Module) -> tuple[int, int, int]:
    """Gradients are those of the plain model; returns bytes kept in a graph, in Python, and by the plain model."""
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    rows = 8, 8
    for found, expected in zip(steps(compiled, model, rows), steps(plain, plain, rows), strict=True):
        assert torch.equal(found, expected)
    steps(model, model, rows)
    return kept_bytes(compiled), kept_bytes(model), kept_bytes(plain)


@pytest.mark.parametrize("regions", PLANS.values(), ids=list(PLANS))
def test_a_plan_over_several_modules(regions):
    plain, model = stack(Block, 4), stack(Block, 4)
    lowtide.apply(model, Plan(tuple(regions), fingerprint(model), 0, 0, 0.0, 0.0, "by hand"))
    in_graph, in_python, without = check_equal(model, plain)
    assert in_graph == in_python < without


def test_a_segment_saves_nothing_between_its_members():
    model = stack(Block, 4)
    install([(str(index), block) for index, block in enumerate(model)])
    assert kept_bytes(torch.compile(model, backend="aot_eager")) == torch.tensor(0.0).nbytes


class Branches(nn.Module):
    """What the first block makes is used again later, in what comes after the segment."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.between, self.second, self.last = Block(), Block(), Block(), Block()
        self.with_between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.between(y) if self.with_between else y
        return self.last(self.second(z) + torch.exp(y))


@pytest.mark.parametrize("between", [False, True])
def test_members_whose_results_go_elsewhere_or_between_which_another_region_runs(between):
    plain, model = Branches(between), Branches(between)
    install([("first", model.first), ("second", model.second)])
    install([("between", model.between)])
    install([("last", model.last)])
    in_graph, in_python, without = check_equal(model, plain)
    assert in_graph == in_python < without


class Parts(Block):
    """A region of two layers with an op between them, which makes a part of each."""

    def __init__(self) -> None:
        super().__init__()
        install([("up", self.up), ("down", self.down)])


def test_members_with_an_op_between_them():
    in_graph, in_python, _ = check_equal(stack(Parts, 2), stack(Block, 2))
    assert in_graph == in_python


def test_a_policy_that_keeps_inside_a_region_that_does_not():
    plain, model = stack(Block), stack(Block)
    lowtide.apply(model, lowtide.policy.keep(lowtide.policy.op("aten.addmm")))
    assert kept_bytes(torch.compile(model, backend="aot_eager")) > 3 * ROW
    install([("", model)], around=True)
    in_graph, in_python, without = check_equal(model, plain)
    assert in_graph == in_python == torch.tensor(0.0).nbytes < without


class Broken(nn.Module):
    """Two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(Block, 2), stack(Block, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_segment_that_a_break_cuts_in_two():
    plain, model = Broken(), Broken()
    paths = "first.0", "first.1", "second.0", "second.1"
    regions = (PlannedRegion(paths, kept=(KeptCall("second.1.up", LINEAR, 0),)),)
    lowtide.apply(model, Plan(regions, fingerprint(model), 0, 0, 0.0, 0.0, "by hand"))
    compiled = torch.compile(model, backend="aot_eager")
    for found, expected in zip(steps(compiled, model), steps(plain, plain), strict=True):
        assert torch.equal(found, expected)
    steps(model, model)
    assert kept_bytes(compiled) == kept_bytes(model) + ROW
