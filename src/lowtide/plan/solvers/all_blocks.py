"""Replay every block: what switching on activation checkpointing does in most training code."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families

NAME = "all"


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each family of blocks: each block is a region."""
    return [[PlannedRegion((path,)) for path in paths] for paths in families(index)]
