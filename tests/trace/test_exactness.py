"""The traced peak against an independent count: the allocator's events in steps that nothing of lowtide's touches."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowtide.measure import peak_bytes
from lowtide.plan import simulate
from lowtide.records import StepTrace
from lowtide.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
from _steps import STEPS, Made


def resident_bytes(traced: StepTrace) -> int:
    return sum(storage.bytes for storage in traced.storages if storage.resident)


@pytest.fixture(params=STEPS.values(), ids=STEPS.keys())
def made(request: pytest.FixtureRequest) -> Made:
    return request.param()


def test_traced_peak_equals_the_allocators_count(made: Made) -> None:
    model, step = made
    traced = trace(model, step)
    step()
    assert simulate(traced, None).peak_bytes == pytest.approx(peak_bytes(step, torch.device("cpu"), resident_bytes(traced)), rel=0.002)


def test_two_traces_of_one_step_are_equal_but_for_times(made: Made) -> None:
    def untimed(traced: StepTrace) -> StepTrace:
        return dataclasses.replace(traced, ops=tuple(dataclasses.replace(op, seconds=0.0) for op in traced.ops))

    model, step = made
    step()
    assert untimed(trace(model, step)) == untimed(trace(model, step))


def test_a_traced_step_computes_what_the_plain_step_does(made: Made) -> None:
    model, step = made
    step()
    gradients: list[list[torch.Tensor]] = []
    for run in (step, lambda: trace_without_restoring(model, step)):
        torch.manual_seed(1)
        model.zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        run()
        gradients.append([p.grad.to_dense().clone() for p in model.parameters() if p.grad is not None])
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
    assert gradients[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def trace_without_restoring(model: torch.nn.Module, step: Callable[[], object]) -> None:
    from lowtide.trace import record_step

    record_step(model, step)
