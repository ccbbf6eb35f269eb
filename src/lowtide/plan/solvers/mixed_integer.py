"""The fastest set of regions within a budget, and the smallest budget there is: exact, by mixed-integer programming.

Checkmate (Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization") states
rematerialization as a program over ops; here the decisions are over regions, what they keep, and segments of them, each
replayed once, which is what the engine runs. The program (see ``_problem``) is exact for
these decisions, whatever regions have to do with each other; what it finds is simulated before it is believed, and should the
simulated peak be over budget, by the tolerance of the solver, the program is solved again with the budget lowered by the difference.

Known shortcoming: among many blocks that are equal to the last digit, in bytes and in measured time, the proof that
nothing is faster can outlast the time limit by far; what is found meanwhile is the best or within a few per cent of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.plan._candidate import Candidate
from lowtide.plan._candidates import SEGMENTS, Candidates, candidates
from lowtide.plan._index import TraceIndex
from lowtide.plan._problem import MemoryModel, memory_model
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._outcome import Outcome
from lowtide.plan.solvers._program import Choice, fastest, lowest

NAME = "mixed-integer"
_TIGHTENINGS = 8
_REL_GAP, _REL_GAP_OF_MANY = 1e-6, 2e-3
_MANY = 100
"""Of so many candidates, a plan within a part of a thousand of the best added time is taken: the times themselves are not known better."""
_LEAST_TIME_S = 0.1


class MixedInteger:
    """Searches over the candidates of one trace: those with the shorter segments alone first, where there are many, and then all.

    Args:
        index: of the trace.
        only: search these candidates alone.
        name: of the solver.
    """

    def __init__(self, index: TraceIndex, only: Sequence[Candidate] | None = None, name: str = NAME) -> None:
        self._index, self._only, self.name = index, only, name
        self._models: dict[int, tuple[MemoryModel, bool]] = {}

    def fastest_within(self, budget_bytes: int, *, time_limit_s: float, better_than_s: float = math.inf) -> Outcome:
        """The fastest regions within the budget, if they are better than what is known."""
        found = Outcome(None, None, 0.0)
        for model, complete, left_s in self._staged(time.monotonic() + time_limit_s):
            known_s = better_than_s if found.simulation is None else found.simulation.added_s
            outcome = fastest_within(self._index, model, budget_bytes, time_limit_s=left_s, better_than_s=known_s)
            bound = min(outcome.bound, known_s) if complete else 0.0
            found = replace(outcome if outcome.regions is not None else found, bound=bound)
        return found

    def smallest_peak(self, at_most_bytes: int, *, time_limit_s: float) -> Outcome:
        """The regions of the smallest peak, however slow, given that some plan has a peak of ``at_most_bytes``."""
        best = Outcome(None, None, 0.0)
        for model, complete, left_s in self._staged(time.monotonic() + time_limit_s):
            outcome = smallest_peak(self._index, model, at_most_bytes, time_limit_s=left_s)
            at_most_bytes = at_most_bytes if outcome.simulation is None else min(at_most_bytes, outcome.simulation.peak_bytes)
            best = replace(outcome if outcome.regions is not None else best, bound=outcome.bound if complete else 0.0)
        return best

    def _staged(self, deadline: float) -> Iterator[tuple[MemoryModel, bool, float]]:
        """Each model with whether it has all candidates, and the time that may be spent on it."""
        for size in SEGMENTS:
            if size not in self._models:
                until = (time.monotonic() + deadline) / 2
                found = candidates(self._index, size, until=until) if self._only is None else Candidates(tuple(self._only), True)
                self._models[size] = (memory_model(self._index, found.regions), found.complete)
            model, complete = self._models[size]
            last = complete or size == SEGMENTS[-1]
            left_s = max(deadline - time.monotonic(), 0.0)
            yield model, complete, left_s if last else left_s / 2
            if last or time.monotonic() > deadline:
                return


def fastest_within(
    index: TraceIndex, model: MemoryModel, budget_bytes: int, *, time_limit_s: float, better_than_s: float = math.inf
) -> Outcome:
    """The fastest regions within the budget, if they are better than what is known."""
    deadline = time.monotonic() + time_limit_s
    allowed = budget_bytes
    rel_gap = _REL_GAP if len(model.candidates) < _MANY else _REL_GAP_OF_MANY
    first: Choice | None = None
    for _ in range(_TIGHTENINGS):
        left_s = max(deadline - time.monotonic(), _LEAST_TIME_S)
        choice = fastest(
            model,
            allowed,
            time_limit_s=left_s,
            rel_gap=rel_gap,
            better_than_s=better_than_s,
        )
        first = first or choice
        regions, simulation = _simulated(index, model, choice)
        if simulation is None:
            break
        if simulation.peak_bytes <= budget_bytes:
            return Outcome(regions, simulation, first.bound)
        allowed -= simulation.peak_bytes - budget_bytes
    return Outcome(None, None, first.bound if first else 0.0)


def smallest_peak(index: TraceIndex, model: MemoryModel, at_most_bytes: int, *, time_limit_s: float) -> Outcome:
    """The regions of the smallest peak, however slow, given that some plan has a peak of ``at_most_bytes``."""
    choice = lowest(model, at_most_bytes, time_limit_s=time_limit_s)
    return Outcome(*_simulated(index, model, choice), choice.bound)


def _simulated(index: TraceIndex, model: MemoryModel, choice: Choice) -> tuple[tuple[PlannedRegion, ...] | None, Simulation | None]:
    if choice.chosen is None:
        return None, None
    regions = tuple(model.candidates[i].region for i in choice.chosen)
    return regions, run(index, regions)
