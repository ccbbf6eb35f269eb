"""Replay the first k blocks: what people do by hand who have measured it, and hard to beat at that.

The last blocks are wanted first in backward, while everything else is still alive: to replay those frees nothing at the peak.
"""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families, most_tried

NAME = "first-k"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each number of blocks, counted from the start of the model."""
    return [[PlannedRegion((path,)) for path in paths[:n]] for paths in families(index) for n in _numbers(len(paths))]


def _numbers(blocks: int) -> range:
    return range(1, blocks, 1 + blocks // most_tried(blocks))
