"""What a trace costs, in calls rather than seconds; and that it works for very many regions."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.plan import simulate
from lowtide.records import StepTrace
from lowtide.trace import trace
from lowtide.workloads import bundled

OF_THE_TRACER = str(Path(sys.modules[trace.__module__].__file__ or "").parent)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def made(blocks: int) -> tuple[nn.Module, Callable[[], object]]:
    model, x = nn.Sequential(*(Block(8) for _ in range(blocks))), torch.randn(4, 8)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return model, step


def calls_of_the_tracer(blocks: int) -> tuple[int, int]:
    """How many functions of the tracer are called in a trace of so many blocks, and how many ops it has."""
    model, step = made(blocks)
    count = 0

    def on_event(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(OF_THE_TRACER)

    sys.setprofile(on_event)
    try:
        traced = trace(model, step)
    finally:
        sys.setprofile(None)
    return count, len(traced.ops)


def test_an_op_costs_a_few_dozen_calls_however_many_there_are() -> None:
    few, many = calls_of_the_tracer(10), calls_of_the_tracer(40)
    per_op = (many[0] - few[0]) / (many[1] - few[1])
    assert per_op < 55
    assert many[0] / many[1] < 1.05 * few[0] / few[1]


def test_the_clock_is_asked_about_a_few_ops_of_a_kind(monkeypatch) -> None:
    asked = 0

    def clock() -> int:
        nonlocal asked
        asked += 1
        return asked

    monkeypatch.setattr("time.thread_time_ns", clock)
    monkeypatch.setattr("time.perf_counter_ns", clock)
    model, step = made(40)
    traced = trace(model, step)
    kinds = len({op.name for op in traced.ops}) + 2  # the last gradient is of one number, and the first input wants none
    assert 0 < asked <= 2 * 15 * kinds < len(traced.ops)
    assert all(op.seconds > 0 for op in traced.ops)


def test_the_compiler_is_not_imported_for_a_trace() -> None:
    code = "import sys, lowtide, torch; m = torch.nn.Linear(2, 2); lowtide.trace(m, lambda: m(torch.ones(1, 2)).sum().backward())"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch._dynamo' not in sys.modules"], check=True)


class Products(TorchDispatchMode):
    """Counts the ops that a step spends most of its time in."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def products_in(run: Callable[[], object]) -> int:
    with Products() as seen:
        run()
    return seen.count


def test_a_trace_runs_the_step_twice_of_which_it_records_one() -> None:
    workload = bundled("gpt", blocks=2, corpus_bytes=2**16)
    assert products_in(lambda: trace(workload.model, workload.step)) == 2 * products_in(workload.step) > 0


def test_a_trace_leaves_nothing_for_the_garbage_collector() -> None:
    model, step = made(10)
    trace(model, step)
    gc.collect()
    gc.disable()
    try:
        traced = trace(model, step)
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert len(traced.calls) == 2 * 10 + 1


@pytest.mark.slow
def test_three_thousand_regions_are_traced_saved_and_read() -> None:
    model, step = made(3000)
    traced = trace(model, step)
    assert len(traced.calls) == 2 * 3000 + 1
    assert StepTrace.from_json(traced.to_json()) == traced
    assert simulate(traced, None).peak_bytes > 3000 * 3 * 4 * 8 * 4
