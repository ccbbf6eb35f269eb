"""The solvers on one trace, for one budget after another; ``simulate`` says which of their plans is the fastest that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.errors import InfeasibleBudgetError, InvalidInputError
from lowtide.plan._index import CATEGORIES, TraceIndex
from lowtide.plan._overhead import ENGINE, Overhead
from lowtide.plan._replay import name_of
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import FEASIBLE, OPTIMAL, Plan, PlannedRegion
from lowtide.plan.solvers import none
from lowtide.plan.solvers._outcome import Outcome
from lowtide.plan.solvers.exact import Exact, suited
from lowtide.plan.solvers.registry import AUTO, SOLVERS, Rule, Solver, solver_named
from lowtide.records import StepTrace
from lowtide.units import format_bytes

Progress = Callable[[str], None]
_GAP_OF_OPTIMAL = 1.0001e-4
"""The precision of the search in large models, and of its arithmetic."""
_SHARE_OF_SMALLEST = 0.6
_SHARE_OF_CANDIDATES = 0.5
"""Of the time, what finding them may take before it is cut short."""
_MOST_TO_POLISH = 200
_MANY_CALLS = 300
_CLOSE = 1e-4
"""Of the peak: two budgets so close together are one."""


@dataclass(frozen=True)
class Scored:
    """Regions from one solver, with what they do to the step."""

    solver: str
    regions: tuple[PlannedRegion, ...]
    peak_bytes: int
    added_s: float
    planned_s: float

    @staticmethod
    def of(solver: str, regions: tuple[PlannedRegion, ...], simulation: Simulation) -> Scored:
        """Without the timeline: of long steps, hundreds of them would fill the memory."""
        return Scored(solver, regions, simulation.peak_bytes, simulation.added_s, simulation.planned_s)

    @property
    def by_time(self) -> tuple[float, int]:
        """For the fastest, and of those the one of least peak."""
        return self.added_s, self.peak_bytes

    @property
    def by_peak(self) -> tuple[int, float]:
        """For the one of least peak, and of those the fastest."""
        return self.peak_bytes, self.added_s


class Search:
    """Plans of one step.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for all that is asked of it.
        solver: name of the only solver to ask; by default all rules, and the exact solver that suits the model.
        progress: told, in a few words, what is being done.
        overhead: what the engine takes.

    Raises:
        InvalidInputError: there is no such solver.
    """

    def __init__(
        self,
        trace: StepTrace,
        time_limit_s: float,
        solver: str = AUTO,
        progress: Progress | None = None,
        overhead: Overhead = ENGINE,
    ) -> None:
        self._deadline = time.monotonic() + time_limit_s
        self._say = progress or (lambda _: None)
        self._exact = suited if solver == AUTO else solver_named(solver).exact
        self._asked = solver
        self.index = TraceIndex(trace, overhead)
        self._smallest: Scored | None = None
        self._hurried = False

    @cached_property
    def rules(self) -> list[Scored]:
        """The plans of the rules of thumb; the step as it is among them."""
        self._say("trying rules of thumb")
        asked = [s for s in SOLVERS.values() if s.name in (self._asked, none.NAME) or (self._asked == AUTO and self._is_quick(s))]
        return [self.score(s.name, tuple(regions)) for s in asked if s.rule is not None for regions in self._plans_of(s.rule)]

    def _is_quick(self, solver: Solver) -> bool:
        """Not where schedules with regions inside regions take long to simulate: of many blocks."""
        return not solver.nests or self.index.module_calls <= _MANY_CALLS

    def _plans_of(self, rule: Rule) -> list[list[PlannedRegion]]:
        try:
            return rule(self.index)
        except InvalidInputError:  # for chains alone, and the step is none
            if self._asked != AUTO:
                raise
            return []

    @cached_property
    def exact(self) -> Exact | None:
        """The exact solver, if one is to be asked."""
        if self._exact is None:
            return None
        self._say(f"finding what may be replayed, of {self.index.module_calls} module calls")
        until = time.monotonic() + self._left_s() * _SHARE_OF_CANDIDATES
        exact = self._exact(self.index, until)
        self._hurried = time.monotonic() > until
        self._say(f"searching with {exact.name}")
        return exact

    def score(self, solver: str, regions: tuple[PlannedRegion, ...]) -> Scored:
        """Simulate."""
        return Scored.of(solver, regions, run(self.index, regions))

    def fastest(self, budget_bytes: int) -> Plan:
        """The fastest plan within a budget.

        Raises:
            InfeasibleBudgetError: no plan fits; the error has the smallest budget that one meets.
        """
        fitting = [rule for rule in self.rules if rule.peak_bytes <= budget_bytes]
        if none.NAME in (rule.solver for rule in fitting):
            return self.plan(fitting[0], budget_bytes, bound=0.0)
        found, bound = self._fastest_within(budget_bytes)
        fitting += found or ([] if fitting else self._squeezed(budget_bytes))
        return self.plan(min(fitting, key=lambda s: s.by_time), budget_bytes, bound=bound)

    def leanest(self) -> Plan:
        """The plan of the smallest peak, and of those the fastest."""
        budget_bytes = self.smallest().peak_bytes
        found, bound = self._fastest_within(budget_bytes)
        fitting = [rule for rule in self.rules if rule.peak_bytes <= budget_bytes]
        best = min([self.smallest(), *fitting, *found], key=lambda s: s.by_time)
        return self.plan(best, budget_bytes, bound=bound)

    def leanest_within(self, added_s: float) -> Plan:
        """The plan of the smallest peak that adds no more than so many seconds, by bisection; its budget is that peak."""
        best = min((rule for rule in self.rules if rule.added_s <= added_s), key=lambda s: s.by_peak)
        low, high = 0, best.peak_bytes
        while low < high and self.exact is not None and self._left_s():
            middle = (low + high) // 2
            outcome = self.exact.fastest_within(middle, time_limit_s=self._left_s(), better_than_s=math.nextafter(added_s, math.inf))
            for found in self._scored(outcome):
                best, high = found, found.peak_bytes
            low = low if outcome.regions is not None else middle + 1
            if high - low <= high * _CLOSE and self.index.module_calls > _MOST_TO_POLISH:
                break
        return self.plan(best, best.peak_bytes, bound=None)

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.0)

    def _scored(self, outcome: Outcome) -> list[Scored]:
        """The plan of the exact solver, if it found one."""
        if outcome.regions is None or outcome.simulation is None or self.exact is None:
            return []
        return [Scored.of(self.exact.name, outcome.regions, outcome.simulation)]

    def _fastest_within(self, budget_bytes: int) -> tuple[list[Scored], float | None]:
        """The fastest plan of the exact solver, if it found one faster than the rules, and the replay time that none is below."""
        if self.exact is None:
            return [], None
        known_s = min((rule.added_s for rule in self.rules if rule.peak_bytes <= budget_bytes), default=math.inf)
        outcome = self.exact.fastest_within(budget_bytes, time_limit_s=self._left_s(), better_than_s=known_s)
        return self._scored(outcome), 0.0 if self._hurried else outcome.bound  # of what was not looked at nothing is known

    def smallest(self) -> Scored:
        """The plan of the smallest peak. Of the time, part is left for a faster plan of that peak."""
        if self._smallest is None:
            self._smallest = min(self.rules, key=lambda s: s.by_peak)
            if self.exact is not None:
                self._say("finding the smallest peak")
                outcome = self.exact.smallest_peak(self._smallest.peak_bytes, time_limit_s=self._left_s() * _SHARE_OF_SMALLEST)
                self._smallest = min([*self._scored(outcome), self._smallest], key=lambda s: s.by_peak)
        return self._smallest

    def _squeezed(self, budget_bytes: int) -> list[Scored]:
        """The plan of the smallest peak, where the search for a fast one came back with nothing.

        Raises:
            InfeasibleBudgetError: it does not fit either.
        """
        if self.smallest().peak_bytes > budget_bytes:
            raise _infeasible(run(self.index, self.smallest().regions), budget_bytes)
        return [self.smallest()]

    def _polished(self, scored: Scored, budget_bytes: int) -> Scored:
        """Without regions that the budget can do without: a solver that stopped early may have some."""
        for region in sorted(scored.regions, key=lambda r: -run(self.index, [r]).added_s):
            fewer = self.score(scored.solver, tuple(r for r in scored.regions if r != region))
            scored = fewer if fewer.peak_bytes <= budget_bytes else scored
        return scored

    def plan(self, scored: Scored, budget_bytes: int, *, bound: float | None) -> Plan:
        """As a value, with what was proved of it."""
        gap = _gap(scored.added_s, bound)
        if self._exact is not None and (gap is None or gap > _GAP_OF_OPTIMAL) and len(scored.regions) <= _MOST_TO_POLISH:
            scored = self._polished(scored, budget_bytes)
            gap = _gap(scored.added_s, bound)
        return Plan(
            regions=_in_order(self.index, scored.regions),
            fingerprint=self.index.trace.fingerprint,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=scored.peak_bytes,
            predicted_step_s=scored.planned_s,
            predicted_replay_s=scored.added_s,
            solver=scored.solver,
            status=OPTIMAL if gap is not None and gap <= _GAP_OF_OPTIMAL else FEASIBLE,
            gap=gap,
            device=self.index.trace.device,
            torch_version=self.index.trace.torch_version,
        )


def _gap(replay_s: float, bound_s: float | None) -> float | None:
    """How much of the replay time might be saved at most; nothing, where nothing is replayed."""
    if not replay_s:
        return 0.0
    return None if bound_s is None else max(replay_s - bound_s, 0.0) / replay_s


def _in_order(index: TraceIndex, regions: Sequence[PlannedRegion]) -> tuple[PlannedRegion, ...]:
    return tuple(sorted(regions, key=lambda r: index.calls_of_path[r.paths[0]][0]))


def _infeasible(smallest: Simulation, budget_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plan fits {format_bytes(budget_bytes)} ({budget_bytes} bytes): the smallest budget that works is "
        f"{format_bytes(smallest.peak_bytes)} ({smallest.peak_bytes} bytes), whose peak is in {_where(smallest)}, with {_what(smallest)}",
        budget_bytes=budget_bytes,
        smallest_bytes=smallest.peak_bytes,
    )


def _where(simulation: Simulation) -> str:
    moment = simulation.moments[simulation.peak_moment]
    name = simulation.timeline.trace.ops[moment.op].name
    return f"the replay of {name_of(moment.region)}, at {name}" if moment.region else f"{moment.phase}, at {name}"


def _what(simulation: Simulation) -> str:
    """The bytes alive at the peak by category, most first."""
    live = simulation.timeline.live_bytes[simulation.peak_moment].tolist()
    parts = sorted(zip(live, (c.value for c in CATEGORIES), strict=True), reverse=True)
    return ", ".join(f"{format_bytes(size)} of {name}" for size, name in parts if size)
