"""Leave out the moments that can never be the peak: another moment has at least as many bytes alive, whatever is chosen.

Moment j makes moment i superfluous when ``bytes_j - bytes_i``, a linear function of the choice, is never negative. Its
least value is bounded from below by giving each group of candidates that exclude each other its most negative weight
alone. A step of thousands of ops is left with a few dozen moments that matter, most of them close to each other in
time, so moments are compared with their neighbours first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.plan._index import Flags, Floats, Ints, ints

_NEAR = 16
_MOST_WORK = 5e8
"""Number of coefficients to compare before distant moments are left alone."""


def undominated(rows: Floats, constant: Floats, cliques: Sequence[Sequence[int]]) -> Ints:
    """Which rows to keep, in order of time as they came.

    Args:
        rows: weights, ``(moments, variables)``.
        constant: ``(moments,)``.
        cliques: variables of which one at most is 1; all others are in [0, 1].
    """
    order, starts = _partition(cliques, rows.shape[1])
    grouped = rows[:, order]
    kept = np.arange(len(rows))
    for reach in (_NEAR, _far(rows.shape[1], len(rows))):
        alive = np.ones(len(kept), dtype=np.bool_)
        for shift in range(1, min(reach, len(kept))):
            _compare(grouped[kept], constant[kept], starts, alive, shift)
            _compare(grouped[kept][::-1], constant[kept][::-1], starts, alive[::-1], shift)
        kept = kept[alive]
    return ints(kept)


def _far(variables: int, moments: int) -> int:
    return int(_MOST_WORK / max(1, variables * moments))


def _partition(cliques: Sequence[Sequence[int]], variables: int) -> tuple[Ints, Ints]:
    """Order of the variables such that each part of a partition into exclusive groups is in one run; where the runs start."""
    part = np.full(variables, -1, dtype=np.int64)
    count = 0
    for group in [*sorted(cliques, key=len, reverse=True), *([v] for v in range(variables))]:
        free = [v for v in group if part[v] < 0]
        part[free] = count
        count += bool(free)
    order = np.argsort(part, kind="stable")
    return order, np.searchsorted(part[order], np.arange(count))


def _compare(rows: Floats, constant: Floats, starts: Ints, alive: Flags, shift: int) -> None:
    """Clear ``alive`` of each row that the row ``shift`` places later makes superfluous."""
    one = np.flatnonzero(alive[:-shift] & alive[shift:])
    if not len(one):
        return
    difference = rows[one + shift] - rows[one]
    least = np.minimum(np.minimum.reduceat(difference, starts, axis=1), 0.0).sum(axis=1) if len(starts) else 0.0
    alive[one[constant[one + shift] - constant[one] + least >= 0.0]] = False
