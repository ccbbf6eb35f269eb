"""Traces of a size that was never run, against the trace of that size."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.errors import InvalidInputError
from lowtide.plan import simulate, solve, trace_at
from lowtide.records import StepTrace
from lowtide.workloads.gpt import GPT

from ._traces import MB, chain


@cache
def traced(batch: int, length: int) -> StepTrace:
    torch.manual_seed(0)
    model = GPT(blocks=3, width=32, heads=2, context=128, dropout=0.0)
    x = torch.randint(256, (batch, length))

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    step()
    found = lowtide.trace(model, step)
    return dataclasses.replace(found, ops=tuple(dataclasses.replace(op, seconds=1e-4) for op in found.ops))


@pytest.mark.parametrize("sizes", [((2, 32), (4, 32), (12, 32)), ((2, 32), (2, 48), (2, 112))], ids=["batch", "length"])
def test_bytes_are_those_of_the_trace_at_that_size(sizes: tuple[tuple[int, int], ...]) -> None:
    one, other, wanted = (traced(*size) for size in sizes)
    numbers = [batch * length for batch, length in sizes]
    found = trace_at(one, other, (numbers[0], numbers[1]), numbers[2])
    assert [s.bytes for s in found.storages] == [s.bytes for s in wanted.storages]
    assert [(s.bytes, s.shape) for s in found.saved] == [(s.bytes, s.shape) for s in wanted.saved]
    assert simulate(found, None).peak_bytes == simulate(wanted, None).peak_bytes


def test_a_plan_for_a_size_that_was_never_run_fits_there() -> None:
    found, wanted = trace_at(traced(2, 32), traced(4, 32), (2, 4), 12), traced(12, 32)
    budget = simulate(wanted, None).peak_bytes * 6 // 10
    plan = solve(found, budget)
    assert plan.regions
    assert simulate(wanted, plan).peak_bytes == plan.predicted_peak_bytes <= budget
    assert plan.regions == solve(wanted, budget).regions


def test_a_plan_is_judged_at_another_size() -> None:
    small, larger = chain(6, size=10 * MB), chain(6, size=20 * MB)
    plan = solve(small, 60 * MB)
    assert simulate(trace_at(small, larger, (1, 2), 5), plan).peak_bytes == 5 * plan.predicted_peak_bytes


@pytest.mark.parametrize(
    ("other", "sizes", "size", "message"),
    [
        (chain(4), (3, 3), 5, "two different sizes"),
        (chain(4), (3, 4), 0, "all positive"),
        (chain(5), (3, 4), 5, r"op 4 is \('op', 'backward', None\) in one and \('op', 'forward', 4\) in the other"),
        (dataclasses.replace(chain(4), fingerprint="other"), (3, 4), 5, "different structure"),
        (chain(4, size=20 * MB), (3, 4), 1, "less than none"),
    ],
    ids=["equal sizes", "no size", "another step", "another model", "nothing left"],
)
def test_traces_that_say_nothing_of_the_size(other: StepTrace, sizes: tuple[int, int], size: int, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        trace_at(chain(4), other, sizes, size)
