"""The regions that a solver may choose: module paths, and runs of calls one right after the other, that are worth something.

They come from the calls of the trace alone. What is dominated is left out: a candidate that drops the same saved
tensors by running at least the same ops as another, while it holds and fetches at least as much and touches at least the same calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.plan._candidate import Candidate
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._copies import copies
from lowtide.plan._cuts import first_saved
from lowtide.plan._equal import EqualBlocks
from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._nested import Nesting
from lowtide.plan._options import kept_sets, undominated
from lowtide.plan._path import as_paths
from lowtide.plan._replay import replays_of
from lowtide.plan._runs import runs

_FEW_CALLS = 24
_MOST_OPTIONS = 16
"""Sets of kept calls of one region among which to choose."""

SEGMENTS = (1000, 2400)
"""How many segments to consider at first, and at most: every run of 45 siblings, and every run of 70."""


@dataclass(frozen=True)
class Candidates:
    """The regions worth choosing.

    Attributes:
        regions: single modules first, each in order of first call.
        complete: all of them; otherwise the longest segments are left out, or time was up.
    """

    regions: tuple[Candidate, ...]
    complete: bool


def candidates(index: TraceIndex, most_segments: int = SEGMENTS[-1], *, nested: bool = False, until: float = math.inf) -> Candidates:
    """The candidates of a trace.

    Args:
        index: of the trace.
        most_segments: how many to consider; shorter segments come first.
        nested: give regions with regions inside as well, where regions are intervals of layers.
        until: by ``time.monotonic``, from when on no more is read of what regions could keep, where they could end and what could be
            inside them: then they are whole, which is soon found.
    """
    equal = EqualBlocks(index)
    segments, complete = runs(index, equal, most_segments)
    found = [_candidate(index, paths) for paths in [*_modules(index, equal), *segments]]
    # Pruned once with all their options: of two regions with the same replay, the one that is called less by may keep calls for less.
    options = [c for base in found if base.dropped for c in (_options(index, base) if time.monotonic() < until else (base,))]
    kept = _undominated(options)
    paths = as_paths(index, Conflicts(kept)) if nested else None
    kept += Nesting(index, kept, paths).candidates(until) if paths is not None else ()
    complete = complete and time.monotonic() < until
    return Candidates((*kept, *copies(index, equal, kept)), complete)


def _candidate(index: TraceIndex, paths: tuple[str, ...]) -> Candidate:
    return Candidate(paths, (), tuple(replays_of(index, paths)))


def _options(index: TraceIndex, base: Candidate) -> list[Candidate]:
    """A region with each set of calls worth keeping in it, the empty one first."""
    sets = kept_sets(index, base.replays) if _may_keep(index, base) else []
    found = [base, *(Candidate(base.paths, kept, tuple(replays_of(index, base.paths, kept))) for kept in sets)]
    found += _ending_early(index, base)
    found = _undominated([c for c in found if c.dropped])
    if len(found) <= _MOST_OPTIONS:
        return found
    return [found[i] for i in undominated([(c.freed_bytes, c.seconds, c.peak_bytes) for c in found], _MOST_OPTIONS)]


def _ending_early(index: TraceIndex, base: Candidate) -> Iterator[Candidate]:
    """A region that drops no more than the first of its saved tensors."""
    if _may_keep(index, base):
        for count in first_saved(index, base.replays):
            yield Candidate(base.paths, (), tuple(replays_of(index, base.paths, (), count)), first_saved=count)


def _may_keep(index: TraceIndex, base: Candidate) -> bool:
    """Not a segment of blocks: to keep something in each of them is an option of the blocks themselves. In small models, anything."""
    return index.module_calls <= _FEW_CALLS or sum(not index.is_leaf(call) for call in base.replays[0].calls) <= 1


def _modules(index: TraceIndex, equal: EqualBlocks) -> list[tuple[str, ...]]:
    calls = index.calls_of_path.items()
    return [(path,) for path, c in calls if _is_alone(index, c) and (equal.copied[c] == NEVER).any()]


def _is_alone(index: TraceIndex, calls: list[int]) -> bool:
    """Whether these calls may be regions by themselves: a function that writes to its arguments is given them by the region."""
    if not index.replayable[calls].all() or not index.is_offered[calls].all():
        return False
    return not any(index.is_function[call] and index.written_in(call) for call in calls)


def _undominated(found: list[Candidate]) -> list[Candidate]:
    groups: dict[frozenset[int], list[Candidate]] = {}
    for candidate in found:
        rivals = groups.setdefault(candidate.dropped, [])
        if not any(_dominates(rival, candidate) for rival in rivals):
            rivals[:] = [r for r in rivals if not _dominates(candidate, r)] + [candidate]
    kept = {id(c) for rivals in groups.values() for c in rivals}
    return [c for c in found if id(c) in kept]


def _dominates(one: Candidate, other: Candidate) -> bool:
    """Choosing ``one`` instead of ``other`` is never worse: same drops and same replays, no more held or fetched, no more calls touched."""
    alike = one.ops == other.ops and one.seconds <= other.seconds
    return alike and one.held <= other.held and one.fetched <= other.fetched and one.calls <= other.calls
