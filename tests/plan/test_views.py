"""Modules that are given a view of what the one before returned."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.errors import PlanError
from lowtide.plan import PlannedRegion, replayable_regions, simulate


class Flattening(nn.Module):
    """A norm, and a linear layer that is given its result with fewer dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.linear(self.norm(x).flatten(0, 1)))


def test_a_module_that_is_given_a_view_does_not_join_the_one_before() -> None:
    model, x = Flattening(), torch.randn(2, 4, 8)
    trace = lowtide.trace(model, lambda: model(x).sum().backward())
    assert ("linear", "last") in replayable_regions(trace)
    assert ("norm", "linear") not in replayable_regions(trace)
    with pytest.raises(PlanError, match="never run one after the other"):
        simulate(trace, [PlannedRegion(("norm", "linear"))])
