"""Replay some of the blocks: every second, every third, …, or the first few."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import blocks

NAME = "every-n"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each stride, and for each number of blocks counted from the start of the model."""
    paths = blocks(index)
    strided = [paths[::n] for n in range(2, len(paths))]
    leading = [paths[:n] for n in range(1, len(paths))]
    return [[PlannedRegion((path,)) for path in chosen] for chosen in strided + leading]
