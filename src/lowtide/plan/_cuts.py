"""Where a region can stop dropping: how many of its saved tensors, from the first on, are worth a replay of what leads to them.

The first that a module saves are often cheap (a norm in front of it, a copy in another order of memory) and what follows is dear (its
matrix products). A module is one piece to those who call it, so that no run of smaller ones ends there: the region drops the first of its
saved tensors and keeps the others, and its replay ends where the last of those is back. Bytes against seconds, the ends worth a thought
are on the convex hull, as of what is kept (``_options``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.plan._index import TraceIndex
from lowtide.plan._replay import Replay, slots_of

_MOST = 3
"""Ends of one region among which to choose."""
_MOST_SLOTS = 400
_FEW_CALLS = 24
"""Of such small models all ends are worth a thought."""


def first_saved(index: TraceIndex, replays: Sequence[Replay]) -> list[int]:
    """How many saved tensors a region may drop, fewer than all of them.

    Args:
        index: of the trace.
        replays: of the region when it drops all.
    """
    if index.module_calls <= _FEW_CALLS:
        return [*range(1, max(len(slots_of(index, r.calls)) for r in replays))]
    replay = replays[0]
    slots = slots_of(index, replay.calls)
    drops = np.isin(slots, replay.dropped)
    if any(len(slots_of(index, r.calls)) != len(slots) for r in replays) or not 1 < int(drops.sum()) <= _MOST_SLOTS:
        return []
    storage = index.slot_storage[slots]
    last_place = {int(s): place for place, s in enumerate(storage.tolist())}  # one that is saved twice is gone only if both are dropped
    start = index.start[replay.calls[-1]]
    ends: list[tuple[int, float, int]] = []
    freed, reached = 0, 0
    for place in np.flatnonzero(drops)[:-1].tolist():
        made = int(storage[place])
        reached = max(reached, int(index.position[slots[place]]), int(index.born[made]) + 1)
        freed += int(index.bytes[made]) if last_place[made] == place else 0
        seconds = float(index.seconds[replay.ops[replay.ops < reached]].sum())
        if index.position[slots[place]] > start and freed:
            ends.append((freed, seconds, place + 1))
    whole = (int(index.bytes[np.unique(storage[drops])].sum()), replay.seconds, len(slots))
    return sorted(number for _, _, number in _hull([*ends, whole], index.overhead.region_s) if number != len(slots))


def _hull(ends: Sequence[tuple[int, float, int]], fixed_s: float) -> list[tuple[int, float, int]]:
    """Those that free the most at some price of a byte, from the one of the most bytes a second on."""
    found: list[tuple[int, float, int]] = []
    freed, seconds = 0, -fixed_s
    left = list(ends)
    while left and len(found) < _MOST:
        best = max(left, key=lambda end: ((end[0] - freed) / max(end[1] - seconds, 1e-12), end[0]))
        found.append(best)
        freed, seconds = best[0], best[1]
        left = [end for end in left if end[0] > freed]
    return found
