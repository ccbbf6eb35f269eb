"""The fastest regions within a budget where regions are intervals of layers: exact, as a shortest path within resources.

Whole regions, what they keep and segments of them are edges of a path (``_path``); a path has to stay within the budget at every
moment of the step. Few moments are ever the peak, so the search (``_labels``) watches those alone that some plan it found was over budget
in: each plan is simulated, and the moments where it is over are watched from then on. A plan that the simulation finds within budget
is the fastest of all. What a search of limited width may have missed is known as a bound, and it is searched again, wider, until
nothing faster is left, or time runs out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.plan._candidate import Candidate
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._index import NEVER, Floats, Ints, TraceIndex, ints
from lowtide.plan._live import LiveBytes, Rows
from lowtide.plan._path import Paths
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._labels import Found, LabelSearch
from lowtide.plan.solvers._ledger import Ledger
from lowtide.plan.solvers._multipliers import Multipliers
from lowtide.plan.solvers._outcome import Outcome

NAME = "constrained-path"
_WIDTHS = (60, 500, 4000, 20000)
_MOST_NEW_ROWS, _NEARLY = 24, 0.95
_REL_GAP = 1e-9
"""Times of a plan differ by as much when they are added up in another order."""
_MANY, _REL_GAP_OF_MANY = 100, 1e-4
"""Of so many candidates, a plan within a part of ten thousand of the best added time is taken: times are not known better."""


@dataclass(frozen=True)
class _Tried:
    """A plan, what it does to the step, and whether that is within the budget."""

    regions: tuple[PlannedRegion, ...]
    simulation: Simulation
    fits: bool


class ConstrainedPath:
    """Searches over one set of candidates; the moments watched in one are watched in the next.

    Attributes:
        name: of the solver.
        rows: the watched moments.
    """

    def __init__(self, index: TraceIndex, found: Sequence[Candidate], conflicts: Conflicts, paths: Paths, name: str = NAME) -> None:
        self.name = name
        self._index, self._found, self._paths = index, found, paths
        self._live = LiveBytes(index, found, conflicts)
        self._seconds = np.array([c.seconds for c in found], dtype=np.float64)[paths.candidate]
        self._multipliers = Multipliers(self._seconds)
        self._rel_gap = _REL_GAP if len(found) < _MANY else _REL_GAP_OF_MANY
        self._watched: set[int] = set()
        self.rows = Rows.in_time([self._live.during(ints(())), self._live.in_replays([])])
        self._watch(run(index, []), 0)

    def fastest_within(self, budget_bytes: int, *, time_limit_s: float, better_than_s: float = math.inf) -> Outcome:
        """The fastest regions within the budget, if they are better than what is known."""
        deadline = time.monotonic() + time_limit_s
        best, bound, known_s = Outcome(None, None, 0.0), 0.0, better_than_s
        for width in _WIDTHS:
            while True:
                aim_s = known_s * (1 - self._rel_gap)
                found = self._search(budget_bytes, self._seconds, aim_s, width, deadline)
                bound = max(bound, min(aim_s, found.cut_s, found.seconds))
                tried = self._tried(found, budget_bytes)
                best, known_s = _better(best, tried, known_s)
                if tried is None or tried.fits or time.monotonic() >= deadline:
                    break
                if best.simulation is None:
                    # With as much less allowed as this was over: any plan that fits makes the next searches shorter.
                    less = 2 * budget_bytes - tried.simulation.peak_bytes
                    leaner = self._tried(self._search(less, self._seconds, aim_s, width, deadline), budget_bytes)
                    best, known_s = _better(best, leaner, known_s)
            if bound >= known_s * (1 - self._rel_gap) or time.monotonic() >= deadline:
                break
        return replace(best, bound=min(bound, known_s))

    def smallest_peak(self, at_most_bytes: int, *, time_limit_s: float) -> Outcome:
        """The regions of the smallest peak, however slow, given that some plan has a peak of ``at_most_bytes``; by bisection."""
        deadline = time.monotonic() + time_limit_s
        best, low, high = Outcome(None, None, 0.0), 0, at_most_bytes
        while low < high and time.monotonic() < deadline:
            middle = (low + high) // 2
            tried = self._fitting(middle, deadline)
            if tried is None:
                low = middle + 1
            else:
                best, high = Outcome(tried.regions, tried.simulation, 0.0), tried.simulation.peak_bytes
        return replace(best, bound=float(low))

    def _fitting(self, budget_bytes: int, deadline: float) -> _Tried | None:
        """Some regions within a budget; ``None`` where there are none."""
        nothing = np.zeros_like(self._seconds)
        for width in _WIDTHS:
            while True:
                found = self._search(budget_bytes, nothing, math.inf, width, deadline)
                tried = self._tried(found, budget_bytes)
                if tried is None or tried.fits or time.monotonic() >= deadline:
                    break
            if tried is not None and tried.fits:
                return tried
            if found.cut_s == math.inf:
                return None
        return None

    def _search(self, budget_bytes: int, seconds: Floats, better_than_s: float, width: int, deadline: float) -> Found:
        ledger = Ledger.of(self._paths, self.rows, self._live.known.unions)
        price = self._multipliers.best(ledger, budget_bytes) if seconds.any() else np.zeros(ledger.row_count)
        return LabelSearch(ledger, seconds, price, budget_bytes, better_than_s, width).run(deadline)

    def _tried(self, found: Found, budget_bytes: int) -> _Tried | None:
        """Simulate what was found, and watch where it is over budget; ``None`` if nothing was, or it is over where that is watched."""
        regions = self._regions(found)
        if regions is None:
            return None
        simulation = run(self._index, regions)
        fits = simulation.peak_bytes <= budget_bytes
        return _Tried(regions, simulation, fits) if fits or self._watch(simulation, budget_bytes) else None

    def _regions(self, found: Found) -> tuple[PlannedRegion, ...] | None:
        if found.edges is None:
            return None
        return tuple(self._found[int(self._paths.candidate[edge])].region for edge in found.edges)

    def _watch(self, simulation: Simulation, budget_bytes: int) -> bool:
        """Watch the moments at which a plan is over a budget; whether there are any that were not watched before."""
        new = _over(simulation, budget_bytes, self._watched)
        if not new:
            return False
        self._watched.update(new)
        ops, gaps = (ints(sorted(turn // 2 for turn in new if turn % 2 == odd)) for odd in (1, 0))
        self.rows = Rows.in_time([self.rows, self._live.during(ops), self._live.in_replays(gaps.tolist())])
        return True


def _better(best: Outcome, tried: _Tried | None, known_s: float) -> tuple[Outcome, float]:
    """The better of two plans, if the second fits, and the time of the best that is known."""
    if tried is None or not tried.fits or tried.simulation.added_s >= known_s:
        return best, known_s
    return Outcome(tried.regions, tried.simulation, 0.0), tried.simulation.added_s


def _over(simulation: Simulation, budget_bytes: int, watched: set[int]) -> list[int]:
    """The turns that are highest, not yet watched: one of each stretch of time between two replays.

    Those just below the budget are taken as well where one is over it: another plan of equal blocks would be over it there.
    """
    timeline = simulation.timeline
    total = timeline.live_bytes.sum(axis=1)
    turns = _turns(simulation)
    stretch = np.cumsum(np.concatenate([[0], np.diff(timeline.replay) != 0]))
    high = np.flatnonzero(total > budget_bytes * _NEARLY)
    best: dict[int, int] = {}
    for i in high[np.argsort(-total[high], kind="stable")].tolist():
        best.setdefault(int(stretch[i]), i)
    new = [i for i in best.values() if int(turns[i]) not in watched]
    return list(dict.fromkeys(int(turns[i]) for i in new))[:_MOST_NEW_ROWS] if any(total[i] > budget_bytes for i in new) else []


def _turns(simulation: Simulation) -> Ints:
    """``2 * op + 1`` for the ops of the step, ``2 * before`` for those of replays."""
    timeline = simulation.timeline
    in_step = timeline.replay == NEVER
    following = np.where(in_step, timeline.op, np.iinfo(np.int64).max)
    before = np.minimum.accumulate(following[::-1])[::-1]
    return np.where(in_step, 2 * timeline.op + 1, 2 * before).astype(np.int64)
