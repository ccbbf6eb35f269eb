"""Time against memory: the fastest plan for each of a handful of budgets, from the step as it is down to the smallest peak."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lowtide.errors import InfeasibleBudgetError, PlanError
from lowtide.plan import Plan, PlannedRegion, replayable_regions, simulate, smallest_budget, solve
from lowtide.plan._index import TraceIndex
from lowtide.plan._simulate import run
from lowtide.plan.solvers import all_blocks
from lowtide.records import StepTrace

_MOST_CALLS = 500
"""Of steps with more module calls, points come from rules over blocks: one search of a solver would take longer than all of them."""
_SHARES = (0.25, 0.5, 0.75)
"""Where, between the smallest peak and that of the step as it is, budgets are tried."""


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """One plan.

    Attributes:
        budget_bytes: for which it was made.
        peak_bytes, step_s, replay_s: as simulated.
        regions: what it replays.
        status: ``"optimal"`` or ``"feasible"``; ``"rule"`` where blocks are replayed by a rule, with no search.
    """

    budget_bytes: int
    peak_bytes: int
    step_s: float
    replay_s: float
    regions: tuple[PlannedRegion, ...]
    status: str

    @classmethod
    def of(cls, plan: Plan) -> FrontierPoint:
        """The point of a plan."""
        return cls(plan.budget_bytes, plan.predicted_peak_bytes, plan.predicted_step_s, plan.predicted_replay_s, plan.regions, plan.status)


def frontier(trace: StepTrace, *, time_limit_s: float = 10.0) -> tuple[FrontierPoint, ...]:
    """Solve for a handful of budgets.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for all of them together.

    Very long steps are not searched: for them every second, fourth, … block, all blocks, and segments of blocks are tried.

    Returns:
        Points of rising peak, none of them both larger and slower than another; the last one replays nothing.
    """
    before = simulate(trace, None)
    plain = FrontierPoint(before.peak_bytes, before.peak_bytes, before.step_s, 0.0, (), "optimal")
    if len(trace.calls) > _MOST_CALLS:
        return _undominated([plain, *_by_rules(trace)])
    if not replayable_regions(trace):
        return (plain,)
    deadline = time.monotonic() + time_limit_s
    smallest = FrontierPoint.of(smallest_budget(trace, time_limit_s=time_limit_s / 2))
    found = [plain, smallest]
    for left, share in zip((3, 2, 1), _SHARES, strict=True):
        budget = smallest.peak_bytes + int(share * (before.peak_bytes - smallest.peak_bytes))
        found += _solved(trace, budget, max((deadline - time.monotonic()) / left, 0.1)) if budget < before.peak_bytes else []
    return _undominated(found)


def _by_rules(trace: StepTrace) -> Iterator[FrontierPoint]:
    """Of each family of blocks: all, some, and segments of 2, 4, 8, … of them."""
    index = TraceIndex(trace)
    for family in all_blocks.regions(index):
        for regions in _ruled([path for region in family for path in region.paths]):
            with suppress(PlanError):  # blocks that do not follow each other are no segment
                after = run(index, regions)
                yield FrontierPoint(after.peak_bytes, after.peak_bytes, after.step_s, after.replay_s, tuple(regions), "rule")


def _ruled(blocks: list[str]) -> Iterator[list[PlannedRegion]]:
    sizes = [2**i for i in range(1, len(blocks).bit_length())]
    for n in (1, *sizes[:4]):
        yield [PlannedRegion((path,)) for path in blocks[::n]]
    for n in sizes[:-1]:
        yield [PlannedRegion(tuple(blocks[i : i + n])) for i in range(0, len(blocks), n)]


def _solved(trace: StepTrace, budget_bytes: int, time_limit_s: float) -> list[FrontierPoint]:
    try:
        return [FrontierPoint.of(solve(trace, budget_bytes, time_limit_s=time_limit_s))]
    except InfeasibleBudgetError:  # the search for the smallest peak came further than this one in its time
        return []


def _undominated(points: list[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    kept: list[FrontierPoint] = []
    for point in sorted(points, key=lambda p: (p.peak_bytes, p.replay_s)):
        if not kept or point.replay_s < kept[-1].replay_s:
            kept.append(point)
    return tuple(kept)
