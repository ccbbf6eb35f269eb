"""What ops allocate while they run is seen once for all that do the same, and only for those."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import StepError
from lowtide.records import StepTrace
from lowtide.trace import trace


class Scaled(nn.Module):
    def __init__(self, width: int, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width, width))
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x * self.scale)


def traced(then: Callable[[Tensor], Tensor]) -> StepTrace:
    model, x = Scaled(64, then), torch.randn(64, 64)
    return trace(model, lambda: model(x).sum().backward())


def workspaces(found: StepTrace, name: str) -> list[int]:
    return [op.workspace_bytes for op in found.ops if op.name == name]


def test_ops_that_read_other_values_are_seen_each_for_itself() -> None:
    few, every = torch.zeros(64, 64, dtype=torch.bool), torch.ones(64, 64, dtype=torch.bool)
    few[0, 0] = True
    small, large = workspaces(traced(lambda x: x[few].sum() + x[every].sum()), "aten.index.Tensor")
    assert small < 100 < 64 * 64 * 2 * 8 <= large  # the places of what is chosen, as two numbers each


def test_ops_whose_tensors_lie_otherwise_are_of_another_kind() -> None:
    # The kernel wants the last dimension to be the innermost, and copies what is on its side.
    upright, turned = workspaces(traced(lambda x: x.softmax(-1) * x.t().softmax(-1)), "aten._softmax.default")
    assert upright == 0 < 64 * 64 * 4 <= turned


def test_ops_with_other_arguments_are_of_another_kind() -> None:
    across, along = workspaces(traced(lambda x: x.median(0).values + x.median(-1).values), "aten.median.dim")
    assert along == 0 < 64 * 64 * 4 <= across


def test_ops_of_one_kind_are_watched_once(monkeypatch) -> None:
    from lowtide.trace import _execution

    watched = []
    run_and_peak = _execution.run_and_peak
    monkeypatch.setattr(_execution, "run_and_peak", lambda run: watched.append(run) or run_and_peak(run))
    found = traced(lambda x: sum((x.softmax(-1) for _ in range(20)), x))
    assert len(workspaces(found, "aten._softmax.default")) == 20
    kinds = {op.name for op in found.ops if op.born_bytes or op.writes}
    assert len(watched) <= len(kinds) + 4


def test_a_step_that_runs_a_profiler_is_refused() -> None:
    model = nn.Linear(2, 2)

    def step() -> None:
        with torch.autograd.profiler.profile():
            model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(StepError, match="must not run a profiler"):
        trace(model, step)


def test_a_profiler_works_after_an_op_has_failed_under_observation() -> None:
    model = nn.Linear(2, 2)

    def step() -> None:
        with pytest.raises(RuntimeError, match="mat1"):
            torch.mm(torch.ones(1, 2), torch.ones(1, 2))
        model(torch.ones(1, 2)).sum().backward()

    trace(model, step)
    with torch.autograd.profiler.profile() as profile:
        step()
    assert len(profile.function_events) > 10
