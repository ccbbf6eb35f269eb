"""What is tried against the plan that was measured: rules of thumb, unless one solver alone was asked for."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from tests.plan._traces import block_chain

from lowtide._fit._costs import Comparison
from lowtide._fit._rivals import Timed, rival
from lowtide.measure import Measurement
from lowtide.plan import simulate, solve
from lowtide.plan.solvers.registry import AUTO

TRACE = block_chain(6)
BEFORE = simulate(TRACE, None)
BUDGET = int(BEFORE.peak_bytes * 0.8)


def rival_of_a_slow_plan(asked: str):
    """The first plan that a solver has within the budget, on a machine where it took three times what was predicted."""
    solver = partial(solve, solver=asked)
    plan = solver(TRACE, BUDGET)
    after, ratio = simulate(TRACE, plan), 3 * plan.predicted_step_s / BEFORE.step_s
    planned = Measurement(after.peak_bytes, ratio * BEFORE.step_s, 0.0, after.replay_s, 5)
    timed = Timed(SimpleNamespace(plan=plan), None, planned, planned, ratio, Comparison(BEFORE, after, planned, ratio))
    return rival(TRACE, timed, BUDGET, solver, asked)


def test_a_plan_that_measured_slow_is_tried_against_a_rule_of_thumb() -> None:
    assert rival_of_a_slow_plan(AUTO).solver in ("first-k", "every-n", "all")


@pytest.mark.parametrize("asked", ["first-k", "all", "sqrt-n", "constrained-path"])
def test_where_one_solver_alone_was_asked_no_other_has_a_plan(asked) -> None:
    found = rival_of_a_slow_plan(asked)
    assert found is None or found.solver == asked
