"""Bytes alive at any moment of the step, as linear functions of the choice of regions.

One binary variable says whether a candidate is chosen. At each moment a storage that is naturally gone is alive when
one of its holders is there: a saved tensor that no chosen region drops (``1 - sum of the regions that drop it``, since
of these one at most is chosen), or a chosen region that has it among its inputs. Where several holders do not reduce
to one such sum, an extra variable that is at least each of them stands for their union; bytes only ever count upwards
to a budget, so it need not be binary and the model stays exact.

A replay raises the bytes alive in one gap by an amount of its own while it runs: one row a gap. What depends on two
choices at once does not occur: whether a saved tensor is dropped, and when its region is replayed, follow from natural
lifetimes alone (see ``_replay``).

A step has thousands of moments and few that can be the peak, so rows are made for the moments that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from lowtide.plan import _scipy as scipy
from lowtide.plan._candidate import Candidate
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._holders import Choices, Expressions
from lowtide.plan._index import NEVER, Floats, Ints, TraceIndex, ints
from lowtide.plan._replay import Replay


@dataclass(frozen=True)
class _Terms:
    """Bytes times expressions, each from one op until another: ``size * expression`` at ``begin <= op < until``."""

    expression: Ints
    begin: Ints
    until: Ints
    size: Ints

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, int]]) -> _Terms:
        table = np.array(rows, dtype=np.int64).reshape(-1, 4)
        return _Terms(table[:, 0], table[:, 1], table[:, 2], table[:, 3])

    def later(self) -> _Terms:
        """The same as they stand in the gaps: what begins with op i is not yet there in the gap before it."""
        return _Terms(self.expression, self.begin + 1, np.maximum(self.until, self.begin + 1), self.size)

    def at(self, places: Ints, expressions: int) -> Floats:
        """Bytes by expression at each of ``places`` (ascending): ``(places, expressions)``."""
        change = np.zeros((len(places) + 1, expressions), dtype=np.float64)
        np.add.at(change, (np.searchsorted(places, self.begin), self.expression), self.size)
        np.subtract.at(change, (np.searchsorted(places, self.until), self.expression), self.size)
        return change.cumsum(axis=0)[:-1]


@dataclass(frozen=True)
class Rows:
    """Bytes alive at some moments: ``weights @ v + constant`` for the variables v, candidates first.

    Attributes:
        turn: ``(moments,)`` when: ``2 * op + 1`` for an op, ``2 * op`` for the gap before it.
        weights: ``(moments, variables)``.
        constant: ``(moments,)``.
    """

    turn: Ints
    weights: Floats
    constant: Floats

    @staticmethod
    def in_time(parts: Sequence[Rows]) -> Rows:
        """All of them, in order of time."""
        turn, weights, constant = (np.concatenate(column) for column in zip(*((p.turn, p.weights, p.constant) for p in parts), strict=True))
        order = np.argsort(turn, kind="stable")
        return Rows(turn[order], weights[order], constant[order])


class LiveBytes:
    """The bytes alive under any choice among some candidates.

    Attributes:
        known: the expressions that bytes are multiplied with.
        places: ops at which something changes: neighbours between them have equal weights.
        gaps: gap to the replays that may run there, as ``(candidate, replay)`` in the order they would.
    """

    def __init__(self, index: TraceIndex, found: Sequence[Candidate], conflicts: Conflicts) -> None:
        self._index = index
        self.known = Expressions(len(found), conflicts)
        self._held = _held_terms(index, found, self.known)
        self._copies = _copy_terms(found, self.known)
        self.gaps = _replays_by_gap(found)
        self._natural = _natural_bytes(index, gaps=False) + index.workspace
        self._natural_in_gaps = _natural_bytes(index, gaps=True)

    @cached_property
    def places(self) -> Ints:
        changes = np.concatenate([self._held.begin, self._held.until, self._copies.begin, self._copies.until, ints([0])])
        return np.unique(changes[changes < self._index.op_count])

    @cached_property
    def table(self) -> tuple[scipy.sparse.csr_array, Floats]:
        """Each expression as weights of the variables, and a constant."""
        return self.known.table()

    def during(self, ops: Ints) -> Rows:
        """Rows of single ops of the step (ascending)."""
        return self._rows(2 * ops + 1, self._added(ops, in_gaps=False), self._natural[ops])

    def between_changes(self) -> Rows:
        """Rows of all ops of the step; neighbours with equal weights are one row, at their maximum."""
        most = np.maximum.reduceat(self._natural, self.places)
        return self._rows(2 * self.places + 1, self._added(self.places, in_gaps=False), most)

    def in_replays(self, gaps: Sequence[int]) -> Rows:
        """Rows of the replays in some gaps (ascending), each at its own peak."""
        places = ints(gaps)
        amounts = self._added(places, in_gaps=True)
        added = [(i, own) for i, gap in enumerate(gaps) for own in _amounts_in_gap(self.gaps[gap], self.known)]
        which = ints(i for i, _ in added)
        own = np.array([own for _, own in added], dtype=np.float64).reshape(-1, len(self.known))
        return self._rows(2 * places[which], amounts[which] + own, self._natural_in_gaps[places[which]])

    def _added(self, places: Ints, *, in_gaps: bool) -> Floats:
        copies = self._copies.later() if in_gaps else self._copies
        return self._held.at(places, len(self.known)) + copies.at(places, len(self.known))

    def _rows(self, turn: Ints, amounts: Floats, fixed: Ints) -> Rows:
        weights, base = self.table
        return Rows(turn, (scipy.sparse.csr_array(amounts) @ weights).toarray(), fixed + amounts @ base)


def _held_terms(index: TraceIndex, found: Sequence[Candidate], known: Expressions) -> _Terms:
    """What holders add to natural lifetimes."""
    holders = _holders(index, found)
    rows = []
    for storage, ends in holders.items():
        begin = int(index.freed[storage])
        for until in sorted({end for end, *_ in ends if end > begin}):
            there = [(dropped_by, candidate) for end, dropped_by, candidate in ends if end >= until]
            union = known.union(frozenset(d for d, _ in there if d is not None), frozenset(c for _, c in there if c is not None))
            rows.append((union, begin, until, int(index.bytes[storage])))
            begin = until
    return _Terms.of(rows)


def _holders(index: TraceIndex, found: Sequence[Candidate]) -> dict[int, list[tuple[int, Choices | None, int | None]]]:
    """For each storage its holders: the end of the hold, and the candidates that drop it or the one that holds it."""
    dropped_by: dict[int, set[int]] = {}
    holders: dict[int, list[tuple[int, Choices | None, int | None]]] = {}
    for i, candidate in enumerate(found):
        for slot in candidate.dropped:
            dropped_by.setdefault(slot, set()).add(i)
        for storage, until in candidate.held:
            holders.setdefault(storage, []).append((until, None, i))
    for slot, storage in enumerate(index.slot_storage.tolist()):
        holders.setdefault(storage, []).append((int(index.released[slot]), frozenset(dropped_by.get(slot, ())), None))
    return holders


def _copy_terms(found: Sequence[Candidate], known: Expressions) -> _Terms:
    """What backward wants of the replays, from each replay on."""
    parts = [np.zeros((4, 0), dtype=np.int64)]
    for i, candidate in enumerate(found):
        for replay in candidate.replays:
            kept = replay.kept_until > replay.before
            until, size = replay.kept_until[kept], replay.index.bytes[replay.born[kept]]
            parts.append(np.stack([np.full_like(until, known.chosen(i)), np.full_like(until, replay.before), until, size]))
    return _Terms(*np.concatenate(parts, axis=1))


def _replays_by_gap(found: Sequence[Candidate]) -> dict[int, list[tuple[int, Replay]]]:
    """Gap to the replays that may run there, as ``(candidate, replay)`` in the order they would."""
    replays = [(i, r) for i, candidate in enumerate(found) for r in candidate.replays if r.before != NEVER]
    replays.sort(key=lambda entry: (entry[1].before, entry[1].first_slot))
    return {before: list(gap) for before, gap in groupby(replays, key=lambda entry: entry[1].before)}


def _amounts_in_gap(gap: Sequence[tuple[int, Replay]], known: Expressions) -> Iterator[Floats]:
    """By expression, what replays add in a gap.

    Those with the same first saved tensor exclude each other, unless one is inside the other and runs after it: one row holds for the
    first of each candidate, another for the second. It adds what earlier replays of the gap have left alive.
    """
    earlier = np.zeros(len(known))
    for _, same in groupby(gap, key=lambda entry: entry[1].first_slot):
        waiting: dict[int, list[Replay]] = {}
        for candidate, replay in same:
            waiting.setdefault(known.chosen(candidate), []).append(replay)
        while waiting:
            own = earlier.copy()
            for candidate, (replay, *later) in list(waiting.items()):
                own[candidate] += replay.peak_bytes
                earlier[candidate] += replay.index.bytes[replay.born[replay.kept_until > replay.before]].sum()
                waiting[candidate] = later
            waiting = {candidate: later for candidate, later in waiting.items() if later}
            yield own


def _natural_bytes(index: TraceIndex, *, gaps: bool) -> Ints:
    """Bytes alive by nature during each op, or in the gap before it."""
    begin = np.where(index.resident, index.born, index.born + gaps)
    change = np.zeros(index.op_count + 2, dtype=np.int64)
    np.add.at(change, begin, index.bytes)
    np.subtract.at(change, np.maximum(index.freed, begin), index.bytes)
    return change.cumsum()[: index.op_count]
