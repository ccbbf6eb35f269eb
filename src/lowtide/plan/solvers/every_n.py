"""Replay some of the blocks: every second, every third, and so on."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families, most_tried

NAME = "every-n"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each stride."""
    return [[PlannedRegion((path,)) for path in chosen] for paths in families(index) for chosen in _strided(paths)]


def _strided(paths: list[str]) -> list[list[str]]:
    return [paths[::n] for n in range(2, len(paths), 1 + len(paths) // most_tried(len(paths)))]
