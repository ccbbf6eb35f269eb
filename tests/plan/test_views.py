"""Modules that are given a view of what the one before returned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.measure import peak_bytes
from lowtide.plan import Plan, PlannedRegion, replayable_regions, simulate

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flatten": lambda y: y.flatten(0, 1),
    "transpose": lambda y: y.transpose(0, 1),
    "slice": lambda y: y[:, 1:],
    "select": lambda y: y[0],
    "chunk": lambda y: y.chunk(2, 1)[0],
    "unbind": lambda y: y.unbind(0)[1],
    "expand": lambda y: y[:1].expand(3, -1, -1),
    "unsqueeze": lambda y: y[None],
    "squeeze": lambda y: y[:1].squeeze(0),
    "movedim": lambda y: y.movedim(0, 1),
    "diagonal": lambda y: y.diagonal(0, 0, 1).t(),
    "strided": lambda y: y.as_strided((4, 8), (8, 1)),
    "unfold": lambda y: y.unfold(1, 2, 2).transpose(2, 3),
    "alias": torch.ops.aten.alias.default,
    "swapped": lambda y: y.swapaxes(0, 1),
}


class Viewing(nn.Module):
    """A norm, and a linear layer that is given a view of its result."""

    def __init__(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.linear, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.view(self.norm(x))))


@pytest.mark.parametrize("name", VIEWS)
def test_a_module_that_is_given_a_view_does_not_join_the_one_before(name: str) -> None:
    model, x = Viewing(VIEWS[name]), torch.randn(2, 4, 8)
    trace = lowtide.trace(model, lambda: model(x).sum().backward())
    assert ("linear", "last") in replayable_regions(trace)
    assert ("norm", "linear") not in replayable_regions(trace)
    with pytest.raises(PlanError, match="never run one after the other"):
        simulate(trace, [PlannedRegion(("norm", "linear"))])


class Sharing(nn.Module):
    """Linear layers that are given the very result of a norm, of which the first makes a view for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.one, self.other = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.inner(x).sin())
        return (self.one(y) * self.other(y)).square()


def test_a_view_that_a_module_makes_for_itself_keeps_no_other_from_joining() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Sharing(), Sharing()), torch.randn(8, 64, 16)

    def step() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = step() and step()
    trace = lowtide.trace(model, step)
    region = ("0.norm", "0.one", "0.other")
    assert region in replayable_regions(trace)
    regions = [PlannedRegion(region), PlannedRegion(tuple(path.replace("0", "1", 1) for path in region))]
    simulated = simulate(trace, regions).peak_bytes
    assert simulated < simulate(trace, None).peak_bytes
    handle = lowtide.apply(model, Plan(tuple(regions), trace.fingerprint, 0, 0, 0.0, 0.0, "by hand"))
    for _ in range(3):
        assert all(map(torch.equal, step(), plain))
    resident = sum(storage.bytes for storage in trace.storages if storage.resident)
    assert peak_bytes(step, torch.device("cpu"), resident) == simulated
    handle.remove()
