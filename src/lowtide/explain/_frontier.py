"""Time against memory: the fastest plan for each of a handful of budgets, from the step as it is down to the smallest peak."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from lowtide.errors import PlanError
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.plan import frontier as whole_frontier
from lowtide.plan.reading import TraceIndex, run, undominated
from lowtide.plan.solvers import all_blocks
from lowtide.records import StepTrace

_MOST_CALLS = 500
"""Of steps with more module calls, points come from rules over blocks: one search of a solver would take longer than all of them."""
_POINTS = 9


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
        points = [plain, *_by_rules(trace)]
    else:
        points = [plain, *map(FrontierPoint.of, whole_frontier(trace, points=_POINTS, time_limit_s=time_limit_s).plans)]
    return undominated(points, lambda point: (point.peak_bytes, point.replay_s))


def _by_rules(trace: StepTrace) -> Iterator[FrontierPoint]:
    """Of each family of blocks: all, some, and segments of 2, 4, 8, … of them."""
    index = TraceIndex(trace)
    for family in all_blocks.regions(index):
        for regions in _ruled([path for region in family for path in region.paths]):
            with suppress(PlanError):  # blocks that do not follow each other are no segment
                after = run(index, regions)
                yield FrontierPoint(after.peak_bytes, after.peak_bytes, after.planned_s, after.added_s, tuple(regions), "rule")


def _ruled(blocks: list[str]) -> Iterator[list[PlannedRegion]]:
    sizes = [2**i for i in range(1, len(blocks).bit_length())]
    for n in (1, *sizes[:4]):
        yield [PlannedRegion((path,)) for path in blocks[::n]]
    for n in sizes[:-1]:
        yield [PlannedRegion(tuple(blocks[i : i + n])) for i in range(0, len(blocks), n)]
