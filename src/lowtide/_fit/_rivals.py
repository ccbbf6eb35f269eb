"""Plans that may be faster than the one that was measured: what a plan promises is tried before it is believed, and so is its worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from lowtide._fit._costs import Comparison
from lowtide.errors import InfeasibleBudgetError
from lowtide.measure import Measurement
from lowtide.plan import Plan, solve
from lowtide.plan.reading import ENGINE, TraceIndex, run
from lowtide.plan.solvers import all_blocks, every_n, first_k
from lowtide.plan.solvers.registry import AUTO
from lowtide.policy import Handle
from lowtide.records import StepTrace
from lowtide.verify import Verification

Solve = Callable[..., Plan]
_WORTH_TRYING = 0.99
_RULES = (first_k.NAME, every_n.NAME, all_blocks.NAME)


@dataclass(frozen=True, slots=True)
class Timed:
    """A plan that is installed, was verified, and was timed."""

    handle: Handle
    verification: Verification
    plain: Measurement
    planned: Measurement
    ratio: float
    comparison: Comparison


def rival(trace: StepTrace, timed: Timed, budget_bytes: int, solver: Solve, asked: str) -> Plan | None:
    """The most promising other plan: by corrected costs, where those it was made with were off, or a rule of thumb.

    Where one solver alone was asked for, the plan is of that one too.

    Args:
        trace: of the plain step.
        timed: the plan that was measured.
        budget_bytes: that the others have to keep as well.
        solver: ``lowtide.solve`` with its options.
        asked: the name that the user gave of a solver.
    """
    found = list(_by_corrected_costs(trace, timed, solver)) if timed.comparison.time_is_off else []
    for rule in (name for name in _RULES if asked in (AUTO, name)):
        with suppress(InfeasibleBudgetError):
            plan = solve(trace, budget_bytes, solver=rule)
            found += [plan] if plan.predicted_step_s < timed.ratio * timed.comparison.before.step_s else []
    others = [plan for plan in found if plan.regions != timed.handle.plan.regions]
    return min(others, key=lambda plan: plan.predicted_step_s, default=None)


def _by_corrected_costs(trace: StepTrace, timed: Timed, solver: Solve) -> Iterator[Plan]:
    """The fastest plan by costs that would have predicted what was measured, if it is faster by those to speak of."""
    costs = timed.comparison.costs()
    corrected = costs.applied(trace)
    now_s = run(TraceIndex(corrected, ENGINE.times(costs.engine)), timed.handle.plan.regions).planned_s
    with suppress(InfeasibleBudgetError):
        plan = solver(corrected, timed.handle.plan.budget_bytes, engine_factor=costs.engine)
        if plan.predicted_step_s < _WORTH_TRYING * now_s:
            yield plan
