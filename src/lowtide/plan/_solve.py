"""From a trace and what is asked to a plan."""

from __future__ import annotations

from lowtide.errors import InvalidInputError
from lowtide.plan._candidates import candidates
from lowtide.plan._index import TraceIndex
from lowtide.plan._overhead import ENGINE
from lowtide.plan._search import Progress, Search
from lowtide.plan._simulate import simulate
from lowtide.plan._solution import Plan
from lowtide.plan.solvers.registry import AUTO
from lowtide.records import StepTrace
from lowtide.units import parse_slowdown


def solve(
    trace: StepTrace,
    budget_bytes: int | None = None,
    *,
    max_slowdown: str | float | None = None,
    time_limit_s: float = 60.0,
    solver: str = AUTO,
    engine_factor: float = 1.0,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest plan that keeps every moment of the step within a budget, or the leanest that is fast enough.

    Decisions are over regions (any module call, and any run of calls one right after the other, replayed as one) and over
    the calls in them whose results are kept. A larger budget never gives a slower plan (by more than a part of ten thousand of what replays
    add, the precision of the search in large models), as long as time does not run out.

    Args:
        trace: of the un-checkpointed step.
        budget_bytes: the peak that is allowed.
        max_slowdown: instead of a budget: how much longer the step may take, ``"5%"`` or ``0.05``. Then the plan of the smallest peak
            is found, and its budget is that peak.
        time_limit_s: for the search; then the best plan so far is returned as ``"feasible"``, with its gap.
        solver: name of the solver to ask; by default all rules of thumb, and the exact solver that suits the model.
        engine_factor: how much slower the engine is on this machine than its figures say; ``fit`` measures it.
        progress: told, in a few words, what is being done.

    Raises:
        InfeasibleBudgetError: no plan fits; the error has the smallest budget that one meets.
        InvalidInputError: there is no such solver, or not just one of budget and slowdown was given.
        BudgetError: the slowdown cannot be read.
    """
    if (budget_bytes is None) == (max_slowdown is None):
        raise InvalidInputError("a plan needs a budget or a largest slowdown, and not both: pass one of budget_bytes and max_slowdown")
    search = Search(trace, time_limit_s, solver, progress, ENGINE.times(engine_factor))
    if budget_bytes is not None:
        return search.fastest(budget_bytes)
    assert max_slowdown is not None
    return search.leanest_within(parse_slowdown(max_slowdown) * simulate(trace, None).step_s)


def smallest_budget(trace: StepTrace, *, time_limit_s: float = 60.0) -> Plan:
    """Find the plan of the smallest peak, and of those the fastest; its budget is that peak.

    The status speaks of its time: ``"optimal"`` when no plan of this peak is faster.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for the search; then it is the smallest peak that was found.
    """
    return Search(trace, time_limit_s).leanest()


def replayable_regions(trace: StepTrace) -> tuple[tuple[str, ...], ...]:
    """The regions that a plan for this step can have, as paths: modules, and runs of sibling modules.

    Empty when there is nothing to replay: no module call, and no run of them, makes a tensor that autograd saves.
    """
    return tuple(candidate.paths for candidate in candidates(TraceIndex(trace)).regions)
