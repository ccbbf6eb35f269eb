"""What a trace costs, and that it works for very many regions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from lowtide.plan import simulate
from lowtide.records import StepTrace
from lowtide.trace import trace
from lowtide.workloads import bundled


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def seconds(run: Callable[[], object], times: int = 3) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def test_a_trace_costs_at_most_twelve_steps() -> None:
    workload = bundled("gpt", blocks=4, corpus_bytes=2**16)
    workload.step()
    step_s = seconds(workload.step)
    assert seconds(lambda: trace(workload.model, workload.step)) <= 12 * step_s


@pytest.mark.slow
def test_three_thousand_regions_are_traced_saved_and_read() -> None:
    model, x = nn.Sequential(*(Block(8) for _ in range(3000))), torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    start = time.perf_counter()
    traced = trace(model, step)
    assert len(traced.calls) == 2 * 3000 + 1
    assert StepTrace.from_json(traced.to_json()) == traced
    assert simulate(traced, None).peak_bytes > 3000 * 3 * 4 * 8 * 4
    assert time.perf_counter() - start < 120
