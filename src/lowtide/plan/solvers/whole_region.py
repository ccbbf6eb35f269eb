"""The fastest set of regions within a budget, and the smallest budget there is: exact, by mixed-integer programming.

Checkmate (Jain et al. 2020, "Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization") states
rematerialization as a program over ops; here the decisions are over regions and segments of consecutive regions, each
replayed once as a whole, which is what the engine runs at no cost per op. The program (see ``_problem``) is exact for
these decisions; what it finds is simulated before it is believed, and should the simulated peak be over budget, the
program is solved again with the budget lowered by the difference.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Found:
    """Regions with what they do, and how well that is proved.

    Attributes:
        regions: of the plan.
        simulation: of them.
        bound: no plan has less replay time (``fit``) or a smaller peak (``squeeze``); seconds or bytes.
    """

    regions: tuple[PlannedRegion, ...]
    simulation: Simulation
    bound: float


def fit(index: TraceIndex, model: MemoryModel, budget_bytes: int, *, time_limit_s: float) -> Found | None:
    """The fastest regions within the budget; ``None`` when none were found, or none exist."""
    deadline = time.monotonic() + time_limit_s
    allowed, bound = budget_bytes, 0.0
    for _ in range(_TIGHTENINGS):
        choice = fastest(model, allowed, time_limit_s=max(deadline - time.monotonic(), 0.1), rel_gap=_REL_GAP)
        if allowed == budget_bytes:
            bound = choice.bound
        if choice.chosen is None:
            return None
        found = _simulated(index, model, choice, bound)
        if found.simulation.peak_bytes <= budget_bytes:
            return found
        allowed -= found.simulation.peak_bytes - budget_bytes
    return None


def squeeze(index: TraceIndex, model: MemoryModel, *, time_limit_s: float) -> Found:
    """The regions of the smallest peak, and of those the fastest."""
    choice = lowest(model, time_limit_s=time_limit_s)
    found = _simulated(index, model, choice, choice.bound)
    faster = fit(index, model, found.simulation.peak_bytes, time_limit_s=time_limit_s)
    return Found(faster.regions, faster.simulation, choice.bound) if faster else found


def _simulated(index: TraceIndex, model: MemoryModel, choice: Choice, bound: float) -> Found:
    regions = tuple(PlannedRegion(model.candidates[i].paths) for i in choice.chosen or ())
    return Found(regions, run(index, regions), bound)
