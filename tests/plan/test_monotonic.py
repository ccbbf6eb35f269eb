"""A larger budget never gives a slower plan, and a faster plan takes more than the smaller budget: on random steps and a real one."""

from __future__ import annotations

import dataclasses
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.plan import Plan, simulate, smallest_budget, solve
from lowtide.records import Op, StepTrace
from lowtide.workloads.gpt import GPT

from ._traces import random_trace

_EQUAL = 1e-4
"""As close as the search goes to the optimum of many candidates."""


def check(trace: StepTrace, shares: list[float], solver: str = "auto") -> None:
    floor, plain = smallest_budget(trace).budget_bytes, simulate(trace, None).peak_bytes
    budgets = sorted({floor + int(share * (plain - floor)) for share in shares} | {floor, plain})
    # Without a limit of time: a search that is ended early promises nothing.
    plans = [solve(trace, budget, solver=solver, time_limit_s=3600.0) for budget in budgets]
    for one, other in pairwise(plans):
        check_pair(one, other)
    assert (plans[-1].regions, plans[-1].predicted_replay_s) == ((), 0.0)


def check_pair(smaller: Plan, larger: Plan) -> None:
    assert smaller.predicted_peak_bytes <= smaller.budget_bytes
    assert larger.predicted_replay_s <= smaller.predicted_replay_s * (1 + _EQUAL)
    if larger.predicted_replay_s < smaller.predicted_replay_s * (1 - _EQUAL):
        assert larger.predicted_peak_bytes > smaller.budget_bytes


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_on_random_steps(random, shares: list[float]) -> None:
    check(random_trace(random, ops=12, functions=3), shares)


@cache
def gpt() -> StepTrace:
    """A transformer's step, with the time of each op a matter of what it reads and returns."""
    torch.manual_seed(0)
    model = GPT(blocks=4, width=32, heads=2, context=32, dropout=0.0)
    x = torch.randint(256, (2, 32))

    def step() -> None:
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()

    step()
    found = lowtide.trace(model, step)
    bytes_of = [storage.bytes for storage in found.storages]

    def seconds(op: Op) -> float:
        size = op.born_bytes + sum(bytes_of[s] for s in op.reads)
        return 1e-9 * size * (20 if any(name in op.name for name in ("mm", "attention")) else 1) + 2e-6

    return dataclasses.replace(found, ops=tuple(dataclasses.replace(op, seconds=seconds(op)) for op in found.ops))


@pytest.mark.parametrize("solver", ["auto", "chain-optimal", "first-k"])
def test_on_a_transformer(solver: str) -> None:
    trace = gpt()
    if solver == "auto":
        check(trace, [i / 12 for i in range(1, 12)])
        return
    plain = simulate(trace, None).peak_bytes
    plans = [solve(trace, plain - plain * i // 40, solver=solver) for i in range(12)]
    for larger, smaller in pairwise(plans):
        check_pair(smaller, larger)
