"""From a trace and a budget to a plan: every solver is asked, and ``simulate`` says which plan is the fastest that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan._candidates import Candidates, candidates
from lowtide.plan._index import CATEGORIES, TraceIndex
from lowtide.plan._problem import MemoryModel, memory_model
from lowtide.plan._replay import name_of
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import FEASIBLE, OPTIMAL, Plan, PlannedRegion
from lowtide.plan.solvers import all_blocks, every_n, none, sqrt_n, whole_region
from lowtide.plan.solvers.whole_region import Outcome
from lowtide.records import StepTrace
from lowtide.units import format_bytes

_RULES = (none, all_blocks, every_n, sqrt_n)
_GAP_OF_OPTIMAL = 1e-4


@dataclass(frozen=True)
class _Scored:
    """Regions from one solver, with what they do to the step."""

    solver: str
    regions: tuple[PlannedRegion, ...]
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        return self.simulation.peak_bytes

    @property
    def by_time(self) -> tuple[float, int]:
        return self.simulation.replay_s, self.simulation.peak_bytes

    @property
    def by_peak(self) -> tuple[int, float]:
        return self.simulation.peak_bytes, self.simulation.replay_s


def solve(trace: StepTrace, budget_bytes: int, *, time_limit_s: float = 60.0) -> Plan:
    """Find the fastest plan that keeps every moment of the step within a budget.

    Decisions are over whole regions: any module call, and any run of consecutive sibling calls, replayed as one.

    Args:
        trace: of the un-checkpointed step.
        budget_bytes: the peak that is allowed.
        time_limit_s: for the search; then the best plan so far is returned as ``"feasible"``, with its gap.

    Raises:
        InfeasibleBudgetError: no plan fits; the error has the smallest budget that one meets.
    """
    search = _Search(trace, time_limit_s)
    fitting = [rule for rule in search.rules if rule.peak_bytes <= budget_bytes]
    if none.NAME in (rule.solver for rule in fitting):
        return search.plan(fitting[0], budget_bytes, bound=0.0)
    outcome = whole_region.fastest_within(search.index, search.model, budget_bytes, time_limit_s=search.seconds_left())
    fitting += search.scored(outcome) or ([] if fitting else search.squeezed(budget_bytes))
    return search.plan(search.polished(min(fitting, key=lambda s: s.by_time), budget_bytes), budget_bytes, bound=outcome.bound)


def smallest_budget(trace: StepTrace, *, time_limit_s: float = 60.0) -> Plan:
    """Find the plan of the smallest peak, and of those the fastest; its budget is that peak.

    The status speaks of its time: ``"optimal"`` when no plan of this peak is faster.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for the search; then it is the smallest peak that was found.
    """
    search = _Search(trace, time_limit_s)
    budget_bytes = search.smallest().peak_bytes
    outcome = whole_region.fastest_within(search.index, search.model, budget_bytes, time_limit_s=search.seconds_left())
    best = min([search.smallest(), *search.scored(outcome)], key=lambda s: s.by_time)
    return search.plan(search.polished(best, budget_bytes), budget_bytes, bound=outcome.bound)


class _Search:
    """The solvers on one trace, sharing what each of them needs."""

    def __init__(self, trace: StepTrace, time_limit_s: float) -> None:
        self._deadline = time.monotonic() + time_limit_s
        self.index = TraceIndex(trace)
        self.rules = [self.score(rule.NAME, tuple(regions)) for rule in _RULES for regions in rule.regions(self.index)]
        self._found: Candidates | None = None
        self._model: MemoryModel | None = None
        self._smallest: _Scored | None = None

    @property
    def model(self) -> MemoryModel:
        if self._model is None:
            self._found = candidates(self.index)
            self._model = memory_model(self.index, self._found.regions)
        return self._model

    def seconds_left(self) -> float:
        return max(self._deadline - time.monotonic(), 1.0)

    def score(self, solver: str, regions: tuple[PlannedRegion, ...]) -> _Scored:
        return _Scored(solver, regions, run(self.index, regions))

    def scored(self, outcome: Outcome) -> list[_Scored]:
        """The plan of the exact solver, if it found one."""
        if outcome.regions is None or outcome.simulation is None:
            return []
        return [_Scored(whole_region.NAME, outcome.regions, outcome.simulation)]

    def smallest(self) -> _Scored:
        """The plan of the smallest peak."""
        if self._smallest is None:
            best = min(self.rules, key=lambda s: s.by_peak)
            outcome = whole_region.smallest_peak(self.index, self.model, best.peak_bytes, time_limit_s=self.seconds_left())
            self._smallest = min([*self.scored(outcome), best], key=lambda s: s.by_peak)
        return self._smallest

    def squeezed(self, budget_bytes: int) -> list[_Scored]:
        """The plan of the smallest peak, where the search for a fast one came back with nothing.

        Raises:
            InfeasibleBudgetError: it does not fit either.
        """
        if self.smallest().peak_bytes > budget_bytes:
            raise _infeasible(self.smallest().simulation, budget_bytes)
        return [self.smallest()]

    def polished(self, scored: _Scored, budget_bytes: int) -> _Scored:
        """Without regions that the budget can do without: a solver that stopped early may have some."""
        for region in sorted(scored.regions, key=lambda r: -run(self.index, [r]).replay_s):
            fewer = self.score(scored.solver, tuple(r for r in scored.regions if r != region))
            scored = fewer if fewer.peak_bytes <= budget_bytes else scored
        return scored

    def plan(self, scored: _Scored, budget_bytes: int, *, bound: float) -> Plan:
        replay_s = scored.simulation.replay_s
        gap = max(replay_s - bound, 0.0) / replay_s if replay_s else 0.0
        complete = self._found is None or self._found.complete
        return Plan(
            regions=_in_order(self.index, scored.regions),
            fingerprint=self.index.trace.fingerprint,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=scored.peak_bytes,
            predicted_step_s=scored.simulation.step_s,
            predicted_replay_s=replay_s,
            solver=scored.solver,
            status=OPTIMAL if gap <= _GAP_OF_OPTIMAL and complete else FEASIBLE,
            gap=gap if complete else None,
            device=self.index.trace.device,
        )


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
