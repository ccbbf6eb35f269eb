"""The live bytes of every moment as linear functions of the choice of regions.

One binary variable says whether a candidate is chosen. At each moment a storage that is naturally gone is alive when
one of its holders is there: a saved tensor that no chosen region drops (``1 - sum of the regions that drop it``, since
of these one at most is chosen), or a chosen region that has it among its inputs. Where several holders do not reduce
to one such sum, an extra variable that is at least each of them stands for their union; bytes only ever count upwards
to a budget, so it need not be binary and the model stays exact.

A replay raises the bytes alive in one gap by an amount of its own while it runs: one row a gap. What depends on two
choices at once does not occur: whether a saved tensor is dropped, and when its region is replayed, follow from natural
lifetimes alone (see ``_replay``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
from scipy import sparse

from lowtide.plan._candidates import Candidate, cliques, conflicts
from lowtide.plan._dominance import undominated
from lowtide.plan._holders import Choices, Expressions
from lowtide.plan._index import NEVER, Floats, Ints, TraceIndex, ints
from lowtide.plan._replay import Replay


@dataclass(frozen=True)
class MemoryModel:
    """``rows @ v + constant`` are bytes alive, a row for each moment that can be the peak.

    Attributes:
        candidates: what may be chosen; the first variables, binary.
        extra: number of further variables, each in [0, 1] and at least every row of ``at_least``.
        rows: ``(moments, variables)``.
        constant: ``(moments,)``.
        at_least, floor: ``at_least @ v >= floor`` ties the extra variables to the choice.
        cliques: groups of candidates of which one at most is chosen.
    """

    candidates: tuple[Candidate, ...]
    extra: int
    rows: sparse.csr_array
    constant: Floats
    at_least: sparse.csr_array
    floor: Floats
    cliques: tuple[tuple[int, ...], ...]

    @cached_property
    def seconds(self) -> Floats:
        """Replay time of each candidate."""
        return np.array([c.seconds for c in self.candidates], dtype=np.float64)


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
class _Moments:
    """Bytes alive at some moments: ``fixed`` and amounts by expression.

    Attributes:
        turn: ``(moments,)`` when: ``2 * op + 1`` for an op, ``2 * op`` for the gap before it.
        amounts: ``(moments, expressions)``.
        fixed: ``(moments,)``.
    """

    turn: Ints
    amounts: Floats
    fixed: Floats

    @staticmethod
    def in_time(parts: Sequence[_Moments]) -> _Moments:
        turn, amounts, fixed = (np.concatenate(column) for column in zip(*((p.turn, p.amounts, p.fixed) for p in parts), strict=True))
        order = np.argsort(turn, kind="stable")
        return _Moments(turn[order], amounts[order], fixed[order])


def memory_model(index: TraceIndex, found: Sequence[Candidate]) -> MemoryModel:
    """Build the model for these candidates."""
    known = Expressions(len(found), conflicts(list(found)))
    held = _held_terms(index, found, known)
    copies = _copy_terms(found, known)
    moments = _Moments.in_time([_step_rows(index, known, held, copies), _gap_rows(index, found, known, held, copies)])
    table, base = known.table()
    groups = tuple(tuple(g) for g in cliques(list(found)))
    weights, constant = (sparse.csr_array(moments.amounts) @ table).toarray(), moments.fixed + moments.amounts @ base
    kept = undominated(weights, constant, groups)
    at_least, floor = known.ties()
    return MemoryModel(tuple(found), known.extra, sparse.csr_array(weights[kept]), constant[kept], at_least, floor, groups)


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
    rows = []
    for i, candidate in enumerate(found):
        for replay in candidate.replays:
            sizes = replay.index.bytes[replay.born]
            kept = zip(replay.kept_until.tolist(), sizes.tolist(), strict=True)
            rows += [(known.chosen(i), replay.before, until, size) for until, size in kept if until > replay.before]
    return _Terms.of(rows)


def _step_rows(index: TraceIndex, known: Expressions, held: _Terms, copies: _Terms) -> _Moments:
    """The ops of the step; neighbours with equal amounts are one moment, at their maximum."""
    changes = np.concatenate([held.begin, held.until, copies.begin, copies.until, ints([0])])
    places = np.unique(changes[changes < index.op_count])
    fixed = np.maximum.reduceat(_natural_bytes(index, gaps=False) + index.workspace, places)
    return _Moments(2 * places + 1, held.at(places, len(known)) + copies.at(places, len(known)), fixed.astype(np.float64))


def _gap_rows(index: TraceIndex, found: Sequence[Candidate], known: Expressions, held: _Terms, copies: _Terms) -> _Moments:
    """The replays, each at its own peak."""
    natural = _natural_bytes(index, gaps=True)
    gaps = _replays_by_gap(found)
    places = ints(gaps)
    amounts = held.at(places, len(known)) + copies.later().at(places, len(known))
    added = [(i, own) for i, gap in enumerate(gaps.values()) for own in _amounts_in_gap(gap, known)]
    which = ints(i for i, _ in added)
    own = np.array([own for _, own in added]).reshape(-1, len(known))
    return _Moments(2 * places[which], amounts[which] + own, natural[places[which]].astype(np.float64))


def _replays_by_gap(found: Sequence[Candidate]) -> dict[int, list[tuple[int, Replay]]]:
    """Gap to the replays that may run there, as ``(candidate, replay)`` in the order they would."""
    replays = [(i, r) for i, candidate in enumerate(found) for r in candidate.replays if r.before != NEVER]
    replays.sort(key=lambda entry: (entry[1].before, entry[1].first_slot))
    return {before: list(gap) for before, gap in groupby(replays, key=lambda entry: entry[1].before)}


def _amounts_in_gap(gap: Sequence[tuple[int, Replay]], known: Expressions) -> Iterator[Floats]:
    """By expression, what replays add in a gap.

    Those with the same first saved tensor exclude each other: one row holds for all of them. It adds what earlier
    replays of the gap have left alive.
    """
    earlier = np.zeros(len(known))
    for _, same in groupby(gap, key=lambda entry: entry[1].first_slot):
        own, left = earlier.copy(), earlier.copy()
        for candidate, replay in same:
            own[known.chosen(candidate)] += replay.peak_bytes
            left[known.chosen(candidate)] += replay.index.bytes[replay.born[replay.kept_until > replay.before]].sum()
        yield own
        earlier = left


def _natural_bytes(index: TraceIndex, *, gaps: bool) -> Ints:
    """Bytes alive by nature during each op, or in the gap before it."""
    begin = np.where(index.resident, index.born, index.born + gaps)
    change = np.zeros(index.op_count + 2, dtype=np.int64)
    np.add.at(change, begin, index.bytes)
    np.subtract.at(change, np.maximum(index.freed, begin), index.bytes)
    return change.cumsum()[: index.op_count]
