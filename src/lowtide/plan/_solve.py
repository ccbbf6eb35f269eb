"""From a trace and a budget to a plan: every solver is asked, and ``simulate`` says which plan is the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan._candidates import candidates
from lowtide.plan._index import CATEGORIES, TraceIndex
from lowtide.plan._problem import MemoryModel, memory_model
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import FEASIBLE, OPTIMAL, Plan, PlannedRegion
from lowtide.plan.solvers import all_blocks, every_n, none, sqrt_n, whole_region
from lowtide.plan.solvers.whole_region import Found
from lowtide.records import StepTrace
from lowtide.units import format_bytes

_RULES = (none, all_blocks, every_n, sqrt_n)
_GAP_OF_OPTIMAL = 1e-4


def solve(trace: StepTrace, budget_bytes: int, *, time_limit_s: float = 60.0) -> Plan:
    """Find the fastest plan that keeps every moment of the step within a budget.

    Args:
        trace: of the un-checkpointed step.
        budget_bytes: the peak that is allowed.
        time_limit_s: for the exact solver; then the best plan so far is returned, with its gap.

    Raises:
        InfeasibleBudgetError: no plan fits; the error has the smallest budget that one meets.
    """
    index = TraceIndex(trace)
    rules = list(_rules_of_thumb(index))
    if rules[0][1].peak_bytes <= budget_bytes:
        return _plan(index, none.NAME, *rules[0], budget_bytes, bound=0.0)
    model = memory_model(index, candidates(index))
    exact = whole_region.fit(index, model, budget_bytes, time_limit_s=time_limit_s)
    fitting = [rule for rule in rules if rule[1].peak_bytes <= budget_bytes]
    if exact is None and not fitting:
        raise _infeasible(index, model, budget_bytes, time_limit_s)
    return _fastest(index, exact, fitting, budget_bytes)


def smallest_budget(trace: StepTrace, *, time_limit_s: float = 60.0) -> Plan:
    """Find the plan of the smallest peak, and of those the fastest; its budget is that peak."""
    index = TraceIndex(trace)
    model = memory_model(index, candidates(index))
    found = whole_region.squeeze(index, model, time_limit_s=time_limit_s)
    return _plan(index, whole_region.NAME, found.regions, found.simulation, found.simulation.peak_bytes, bound=None)


def _rules_of_thumb(index: TraceIndex) -> Iterator[tuple[tuple[PlannedRegion, ...], Simulation]]:
    for rule in _RULES:
        for regions in rule.regions(index):
            yield tuple(regions), run(index, regions)


def _fastest(
    index: TraceIndex, exact: Found | None, rules: Iterable[tuple[tuple[PlannedRegion, ...], Simulation]], budget_bytes: int
) -> Plan:
    plans = [_plan(index, "rule", *rule, budget_bytes, bound=exact.bound if exact else None) for rule in rules]
    if exact is not None:
        plans.insert(0, _plan(index, whole_region.NAME, exact.regions, exact.simulation, budget_bytes, bound=exact.bound))
    return min(plans, key=lambda p: p.predicted_replay_s)


def _plan(
    index: TraceIndex, solver: str, regions: tuple[PlannedRegion, ...], simulation: Simulation, budget_bytes: int, *, bound: float | None
) -> Plan:
    replay_s = simulation.replay_s
    gap = None if bound is None else max(replay_s - bound, 0.0) / replay_s if replay_s else 0.0
    return Plan(
        regions=regions,
        fingerprint=index.trace.fingerprint,
        budget_bytes=budget_bytes,
        predicted_peak_bytes=simulation.peak_bytes,
        predicted_step_s=simulation.step_s,
        predicted_replay_s=replay_s,
        solver=solver,
        status=OPTIMAL if gap is not None and gap <= _GAP_OF_OPTIMAL else FEASIBLE,
        gap=gap,
        device=index.trace.device,
    )


def _infeasible(index: TraceIndex, model: MemoryModel, budget_bytes: int, time_limit_s: float) -> InfeasibleBudgetError:
    smallest = whole_region.squeeze(index, model, time_limit_s=time_limit_s).simulation
    live = smallest.timeline.live_bytes[smallest.peak_moment]
    parts = ", ".join(f"{c.value} {format_bytes(b)}" for b, c in sorted(zip(live.tolist(), CATEGORIES, strict=True), reverse=True) if b)
    return InfeasibleBudgetError(
        f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest budget that one meets is "
        f"{format_bytes(smallest.peak_bytes)} ({smallest.peak_bytes} bytes); at its peak are alive: {parts}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest.peak_bytes,
    )
