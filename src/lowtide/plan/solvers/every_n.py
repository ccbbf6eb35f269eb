"""Replay some of the blocks: every second, every third, …, or the first few."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families

NAME = "every-n"
_MOST = 50
"""Of very many blocks, not every number is tried."""


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each stride, and for each number of blocks counted from the start of the model."""
    return [[PlannedRegion((path,)) for path in chosen] for paths in families(index) for chosen in _choices(paths)]


def _choices(paths: list[str]) -> list[list[str]]:
    step = 1 + len(paths) // _MOST
    strided = [paths[::n] for n in range(2, len(paths), step)]
    leading = [paths[:n] for n in range(1, len(paths), step)]
    return strided + leading
