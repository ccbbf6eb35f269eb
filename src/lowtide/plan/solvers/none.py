"""Replay nothing: the step as it is, the fastest plan where it fits."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion

NAME = "none"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan, without regions."""
    return [[]]
