"""From a trace and a budget to a plan: every solver is asked, and ``simulate`` says which plan is the fastest that fits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan._candidates import SEGMENTS, candidates
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
_SHARE_OF_SMALLEST = 0.6


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
    found, bound = search.fastest_within(budget_bytes)
    fitting += found or ([] if fitting else search.squeezed(budget_bytes))
    return search.plan(search.polished(min(fitting, key=lambda s: s.by_time), budget_bytes), budget_bytes, bound=bound)


def smallest_budget(trace: StepTrace, *, time_limit_s: float = 60.0) -> Plan:
    """Find the plan of the smallest peak, and of those the fastest; its budget is that peak.

    The status speaks of its time: ``"optimal"`` when no plan of this peak is faster.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for the search; then it is the smallest peak that was found.
    """
    search = _Search(trace, time_limit_s)
    budget_bytes = search.smallest().peak_bytes
    found, bound = search.fastest_within(budget_bytes)
    best = min([search.smallest(), *found], key=lambda s: s.by_time)
    return search.plan(search.polished(best, budget_bytes), budget_bytes, bound=bound)


def replayable_regions(trace: StepTrace) -> tuple[tuple[str, ...], ...]:
    """The regions that a plan for this step can have, as paths: modules, and runs of sibling modules.

    Empty when there is nothing to replay: no module call, and no run of them, makes a tensor that autograd saves.
    """
    return tuple(candidate.paths for candidate in candidates(TraceIndex(trace)).regions)


class _Search:
    """The solvers on one trace, sharing what each of them needs."""

    def __init__(self, trace: StepTrace, time_limit_s: float) -> None:
        self._deadline = time.monotonic() + time_limit_s
        self.index = TraceIndex(trace)
        self.rules = [self.score(rule.NAME, tuple(regions)) for rule in _RULES for regions in rule.regions(self.index)]
        self._models: dict[int, tuple[MemoryModel, bool]] = {}
        self._smallest: _Scored | None = None

    def models(self, deadline: float) -> Iterator[tuple[MemoryModel, bool, float]]:
        """The memory model with the shorter segments alone, where there are many, and then with more.

        Each comes with whether it has all candidates, and the time that may be spent on it.
        """
        for size in SEGMENTS:
            if size not in self._models:
                found = candidates(self.index, size)
                self._models[size] = (memory_model(self.index, found.regions), found.complete)
            model, complete = self._models[size]
            last = complete or size == SEGMENTS[-1]
            left_s = max(deadline - time.monotonic(), 0.0)
            yield model, complete, left_s if last else left_s / 2
            if last or time.monotonic() > deadline:
                return

    def score(self, solver: str, regions: tuple[PlannedRegion, ...]) -> _Scored:
        return _Scored(solver, regions, run(self.index, regions))

    def _scored(self, outcome: Outcome) -> list[_Scored]:
        """The plan of the exact solver, if it found one."""
        if outcome.regions is None or outcome.simulation is None:
            return []
        return [_Scored(whole_region.NAME, outcome.regions, outcome.simulation)]

    def fastest_within(self, budget_bytes: int) -> tuple[list[_Scored], float | None]:
        """The fastest plan of the exact solver, if it found one, and the replay time that none is below, if that is known."""
        found: list[_Scored] = []
        bound = None
        for model, complete, time_limit_s in self.models(self._deadline):
            known_s = min((s.simulation.replay_s for s in found), default=math.inf)
            outcome = whole_region.fastest_within(self.index, model, budget_bytes, time_limit_s=time_limit_s, better_than_s=known_s)
            found = self._scored(outcome) or found
            bound = min(outcome.bound, known_s) if complete else None
        return found, bound

    def smallest(self) -> _Scored:
        """The plan of the smallest peak. Of the time, part is left for a faster plan of that peak."""
        if self._smallest is None:
            now = time.monotonic()
            best = min(self.rules, key=lambda s: s.by_peak)
            for model, _, time_limit_s in self.models(now + (self._deadline - now) * _SHARE_OF_SMALLEST):
                outcome = whole_region.smallest_peak(self.index, model, best.peak_bytes, time_limit_s=time_limit_s)
                best = min([*self._scored(outcome), best], key=lambda s: s.by_peak)
            self._smallest = best
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

    def plan(self, scored: _Scored, budget_bytes: int, *, bound: float | None) -> Plan:
        gap = _gap(scored.simulation.replay_s, bound)
        return Plan(
            regions=_in_order(self.index, scored.regions),
            fingerprint=self.index.trace.fingerprint,
            budget_bytes=budget_bytes,
            predicted_peak_bytes=scored.peak_bytes,
            predicted_step_s=scored.simulation.step_s,
            predicted_replay_s=scored.simulation.replay_s,
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
