"""The solvers that prove what they find: which of them there are, and which suits a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from lowtide.plan._candidate import Candidate
from lowtide.plan._candidates import candidates
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._index import TraceIndex
from lowtide.plan._path import as_paths
from lowtide.plan.solvers import constrained_path, mixed_integer
from lowtide.plan.solvers._outcome import Outcome
from lowtide.plan.solvers.constrained_path import ConstrainedPath
from lowtide.plan.solvers.mixed_integer import MixedInteger

WHOLE_REGION = "whole-region"
NESTED = "nested-path"


class Exact(Protocol):
    """A solver over one trace."""

    @property
    def name(self) -> str:
        """Of the solver, as plans name it."""

    def fastest_within(self, budget_bytes: int, *, time_limit_s: float, better_than_s: float = math.inf) -> Outcome:
        """The fastest regions within the budget, if they are better than what is known."""

    def smallest_peak(self, at_most_bytes: int, *, time_limit_s: float) -> Outcome:
        """The regions of the smallest peak, however slow, given that some plan has a peak of ``at_most_bytes``."""


def suited(index: TraceIndex, until: float = math.inf) -> Exact:
    """The solver over paths where regions are intervals of layers, with regions inside regions, and the general one elsewhere.

    Args:
        index: of the trace.
        until: as of ``candidates``.
    """
    return _over_paths(index, candidates(index, nested=True, until=until).regions, NESTED) or MixedInteger(index)


def flat(index: TraceIndex, until: float = math.inf) -> Exact:
    """As ``suited``, with no region inside another."""
    return _over_paths(index, candidates(index, until=until).regions, constrained_path.NAME) or MixedInteger(index)


def whole_regions(index: TraceIndex, until: float = math.inf) -> Exact:
    """As ``suited``, with regions that keep nothing: the knapsack over modules and segments that whole-module planners solve."""
    found = [c for c in candidates(index, until=until).regions if not c.kept and c.first_saved is None]
    return _over_paths(index, found, WHOLE_REGION) or MixedInteger(index, found, WHOLE_REGION)


def general(index: TraceIndex, _until: float = math.inf) -> Exact:
    """The mixed-integer program, which looks for candidates in the time of its search."""
    return MixedInteger(index)


def _over_paths(index: TraceIndex, found: Sequence[Candidate], name: str) -> Exact | None:
    conflicts = Conflicts(found)
    paths = as_paths(index, conflicts)
    return None if paths is None else ConstrainedPath(index, found, conflicts, paths, name)


__all__ = ["NESTED", "WHOLE_REGION", "Exact", "flat", "general", "mixed_integer", "suited", "whole_regions"]
