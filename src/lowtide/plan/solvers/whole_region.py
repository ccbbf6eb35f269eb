"""The fastest set of regions within a budget, and the smallest budget there is: exact, by mixed-integer programming.

Checkmate (Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization") states
rematerialization as a program over ops; here the decisions are over regions and segments of consecutive regions, each
replayed once as a whole, which is what the engine runs at no cost per op. The program (see ``_problem``) is exact for
these decisions; what it finds is simulated before it is believed, and should the simulated peak be over budget, by
the tolerance of the solver, the program is solved again with the budget lowered by the difference.

Known shortcoming: among many blocks that are equal to the last digit, in bytes and in measured time, the proof that
nothing is faster can outlast the time limit by far; what is found meanwhile is the best or within a few per cent of it.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from lowtide.plan._index import TraceIndex
from lowtide.plan._problem import MemoryModel
from lowtide.plan._simulate import Simulation, run
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._program import Choice, fastest, lowest

NAME = "whole-region"
_TIGHTENINGS = 8
_REL_GAP = 1e-6
_LEAST_TIME_S = 0.1


@dataclass(frozen=True)
class Outcome:
    """What was found, and what was proved.

    Attributes:
        regions, simulation: of the best plan; ``None`` when none was found.
        bound: no choice of regions is better: seconds of replay, or bytes of the smallest peak; infinite when it
            was proved that none fits.
    """

    regions: tuple[PlannedRegion, ...] | None
    simulation: Simulation | None
    bound: float


def fastest_within(
    index: TraceIndex, model: MemoryModel, budget_bytes: int, *, time_limit_s: float, better_than_s: float = math.inf
) -> Outcome:
    """The fastest regions within the budget, if they are better than what is known."""
    deadline = time.monotonic() + time_limit_s
    allowed = budget_bytes
    first: Choice | None = None
    for _ in range(_TIGHTENINGS):
        left_s = max(deadline - time.monotonic(), _LEAST_TIME_S)
        choice = fastest(model, allowed, time_limit_s=left_s, rel_gap=_REL_GAP, better_than_s=better_than_s)
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
    regions = tuple(PlannedRegion(model.candidates[i].paths) for i in choice.chosen)
    return regions, run(index, regions)
