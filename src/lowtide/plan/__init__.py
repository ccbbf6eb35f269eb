"""Plans: what to replay so that a step fits its budget. Torch-free, from a trace alone."""

from __future__ import annotations

from lowtide.plan._frontier import Frontier, frontier
from lowtide.plan._functions import FunctionPath
from lowtide.plan._scaling import trace_at
from lowtide.plan._simulate import Moment, Simulation, Timeline, simulate
from lowtide.plan._solution import KeptCall, Plan, PlannedRegion
from lowtide.plan._solve import replayable_regions, smallest_budget, solve

__all__ = [
    "Frontier",
    "FunctionPath",
    "KeptCall",
    "Moment",
    "Plan",
    "PlannedRegion",
    "Simulation",
    "Timeline",
    "frontier",
    "replayable_regions",
    "simulate",
    "smallest_budget",
    "solve",
    "trace_at",
]
