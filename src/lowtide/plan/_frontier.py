"""Time against memory: the fastest plan for every budget, from the step as it is down to the smallest peak."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lowtide.errors import InfeasibleBudgetError, InvalidInputError
from lowtide.plan._search import Progress, Search
from lowtide.plan._simulate import simulate
from lowtide.plan._solution import Plan
from lowtide.records import StepTrace

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Frontier:
    """Plans of which none is both leaner and faster than another.

    Attributes:
        plans: of falling time and rising peak; the first has the smallest peak that there is, the last replays nothing.
        plain_step_s: time of the step as it is.
        plain_peak_bytes: its peak.
    """

    plans: tuple[Plan, ...]
    plain_step_s: float
    plain_peak_bytes: int

    @property
    def knee(self) -> Plan:
        """The plan furthest below the straight line from the leanest to the fastest: beyond it, less memory is dear.

        As in Satopaa et al. 2011, "Finding a Kneedle in a Haystack", both axes are first stretched to the same length.
        """
        first, last = self.plans[0], self.plans[-1]
        memory = (last.predicted_peak_bytes - first.predicted_peak_bytes) or 1
        time = (first.predicted_replay_s - last.predicted_replay_s) or 1.0

        def below(plan: Plan) -> float:
            left = (last.predicted_peak_bytes - plan.predicted_peak_bytes) / memory
            return left - (plan.predicted_replay_s - last.predicted_replay_s) / time

        return max(self.plans, key=below)

    def points(self) -> tuple[tuple[int, float], ...]:
        """For a plot: the peak in bytes and the time over that of the step as it is, of each plan."""
        return tuple((plan.predicted_peak_bytes, plan.predicted_step_s / (self.plain_step_s or 1.0)) for plan in self.plans)


def frontier(trace: StepTrace, *, points: int = 17, time_limit_s: float = 60.0, progress: Progress | None = None) -> Frontier:
    """Solve for evenly spaced budgets, from the smallest peak to that of the step as it is.

    Args:
        trace: of the un-checkpointed step.
        points: how many budgets are solved for; plans that are the same, or no better than another, are left out.
        time_limit_s: for all of them together; each is the best that was found by then.
        progress: told, in a few words, what is being done.

    Raises:
        InvalidInputError: fewer than two points.
    """
    if points < 2:
        raise InvalidInputError(f"a frontier has two points or more; found {points}")
    search = Search(trace, time_limit_s, progress=progress)
    before = simulate(trace, None)
    found = [search.fastest(before.peak_bytes), search.leanest()]
    low, high = found[1].predicted_peak_bytes, before.peak_bytes
    for i in range(1, points - 1):
        found += _solved(search, low + (high - low) * i // (points - 1))
    best = undominated(found, lambda plan: (plan.predicted_peak_bytes, plan.predicted_replay_s))
    return Frontier(best, before.step_s, before.peak_bytes)


def _solved(search: Search, budget_bytes: int) -> list[Plan]:
    try:
        return [search.fastest(budget_bytes)]
    except InfeasibleBudgetError:  # time ran out
        return []


def undominated(found: Iterable[_Item], costs: Callable[[_Item], tuple[float, float]]) -> tuple[_Item, ...]:
    """Those of which none costs as much or more than another in both ways, in order of the first; of equals the one that comes first."""
    kept: list[_Item] = []
    for item in sorted(found, key=costs):
        if not kept or costs(item)[1] < costs(kept[-1])[1]:
            kept.append(item)
    return tuple(kept)
