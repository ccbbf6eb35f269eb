"""Blocks in segments of equal length, each replayed as one (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost").

With n equal blocks in about sqrt(n) segments, what is kept between segments and what one replay needs grow with sqrt(n)
each. All lengths around that are given, since blocks need not be equal and the best length is then another.
"""

from __future__ import annotations

import math

from lowtide.errors import PlanError
from lowtide.plan._index import TraceIndex
from lowtide.plan._replay import replays_of
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families, most_tried

NAME = "sqrt-n"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each length of segments from two blocks up, the last segment replayed or kept."""
    plans = [plan for paths in families(index) for length in _lengths(len(paths)) for plan in _of_length(paths, length)]
    return [plan for plan in plans if _can_run(index, plan)]


def _lengths(blocks: int) -> range:
    """All that can be the best: below three times the length that is best for equal blocks; of very many blocks, some of them."""
    most = min(blocks, 2 + math.ceil(3 * math.sqrt(blocks)))
    return range(2, most, 1 + most // most_tried(blocks))


def _of_length(paths: list[str], length: int) -> list[list[PlannedRegion]]:
    whole = [PlannedRegion(tuple(paths[i : i + length])) for i in range(0, len(paths), length)]
    return [whole, whole[:-1]]


def _can_run(index: TraceIndex, plan: list[PlannedRegion]) -> bool:
    try:
        return all(replays_of(index, region.paths) for region in plan)
    except PlanError:
        return False
