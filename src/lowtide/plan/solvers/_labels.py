"""The fastest path within the budgets: label setting (Irnich and Desaulniers 2005, "Shortest path problems with resource constraints").

A label is a way to come to a node: its time, and what it has added to the bytes of each watched moment. One that is slower than
another and adds no less anywhere is dropped. Of two kinds of rows nothing need be remembered apart: rows to which all edges so far
add the same share one number, and bytes too few to matter in whatever may follow are all the same. In a chain of blocks that leaves the
bytes kept so far, one number, so that equal blocks in another order are one label.

What a label can come to at best is its time, the price of its bytes, and the cheapest way to go on (Beasley and Christofides 1989, "An
algorithm for the resource constrained shortest path problem"); one that can come to nothing better than a known plan is dropped too.
Where more than ``width`` labels are left at a node the most promising stay, and the best of what the others could have come
to is the bound on what was found. In the worst case labels grow exponentially with the nodes; the width keeps that in hand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from lowtide.plan._index import NEVER, Flags, Floats, Ints, ints
from lowtide.plan.solvers._ledger import Ledger

_CHUNK = 256
_LEAST_WIDTH = 20


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        edges: of the fastest path within the budgets; ``None`` if there is none that is better than what was known.
        seconds: its time; infinite without one.
        cut_s: what was left aside because of the width takes at least so long.
    """

    edges: tuple[int, ...] | None
    seconds: float
    cut_s: float


@dataclass
class _Labels:
    """The labels of one node.

    Attributes:
        seconds: ``(n,)``.
        added: ``(n, groups)`` bytes so far, for each group of rows to which the same was added.
        gone, held: ``(n, switches)`` whether an edge so far let go of the storage, and whether one holds it.
        edge, before: ``(n,)`` the edge that led here, ``NEVER`` for the one that adds nothing, and which label of its start.
    """

    seconds: Floats
    added: Ints
    gone: Flags
    held: Flags
    edge: Ints
    before: Ints

    def at(self, which: Ints) -> _Labels:
        return _Labels(*(column[which] for column in self._columns))

    @staticmethod
    def together(parts: list[_Labels]) -> _Labels:
        return _Labels(*(np.concatenate(column) for column in zip(*(p._columns for p in parts), strict=True)))

    @property
    def _columns(self) -> tuple[Any, ...]:
        return self.seconds, self.added, self.gone, self.held, self.edge, self.before

    @staticmethod
    def first(groups: int, gone: list[bool]) -> _Labels:
        """The one label of the first node."""
        flags = np.array([gone], dtype=np.bool_)
        return _Labels(np.zeros(1), np.zeros((1, groups), dtype=np.int64), flags, np.zeros_like(flags), ints([NEVER]), ints([NEVER]))


@dataclass(frozen=True)
class _Groups:
    """The rows at one node, those together to which all edges so far add the same.

    Attributes:
        of_row: ``(rows,)`` group of each.
        first: ``(groups,)`` one row of each.
        most: ``(groups,)`` bytes that a label may have added, so that the rest of the path can stay within the budget.
        enough: ``(groups,)`` with no more than so many the rest of the path is within the budget whatever it is.
        price: ``(groups,)`` seconds a byte.
    """

    of_row: Ints
    first: Ints
    most: Ints
    enough: Ints
    price: Floats


class LabelSearch:
    """One search.

    Args:
        ledger: bytes by edge and row.
        seconds: of each edge.
        price: of bytes, by row.
        budget_bytes: for every row.
        better_than_s: only paths faster than this are of interest.
        width: how many labels a node may have.
    """

    def __init__(self, ledger: Ledger, seconds: Floats, price: Floats, budget_bytes: int, better_than_s: float, width: int) -> None:
        self._ledger, self._paths, self._seconds, self._price = ledger, ledger.paths, seconds, price
        self._room = budget_bytes - ledger.base
        self._better_than_s, self._width = better_than_s, width
        self._to_go_s = self._paths.least_to_go(seconds + ledger.added @ price) - float(self._room @ price)
        self._cut_s = np.inf
        self._switching = np.zeros(len(seconds), dtype=np.bool_)
        for switch in ledger.switches:
            self._switching[sorted(switch.on | switch.off)] = True
        self._last_off, self._last_on = (
            (
                np.array([max((int(self._paths.start[e]) for e in edges), default=-1) for edges in side], dtype=np.int64)
                for side in zip(*((s.off, s.on) for s in ledger.switches), strict=True)
            )
            if ledger.switches
            else (ints(()), ints(()))
        )

    def run(self, deadline: float = math.inf) -> Found:
        """Search from the first node to the last; past the deadline (of the monotonic clock) with few labels a node."""
        groups = [self._groups(0)]
        nodes = [_Labels.first(len(groups[0].first), [s.gone_at_first for s in self._ledger.switches])]
        for node in range(1, self._paths.nodes):
            if time.monotonic() > deadline:
                self._width = min(self._width, _LEAST_WIDTH)
            groups.append(self._groups(node))
            nodes.append(self._kept(node, groups[node], self._reaching(node, nodes, groups)))
        last = nodes[-1]
        if not len(last.seconds):
            return Found(None, np.inf, self._cut_s)
        best = int(last.seconds.argmin())
        return Found(self._traced_back(nodes, best), float(last.seconds[best]), self._cut_s)

    def _groups(self, node: int) -> _Groups:
        ledger = self._ledger
        _, first, of_row = np.unique(ledger.histories[node], return_index=True, return_inverse=True)
        most, enough = np.full((2, len(first)), np.iinfo(np.int64).max)
        np.minimum.at(most, of_row, self._room - ledger.least_to_go[node])
        np.minimum.at(enough, of_row, self._room - ledger.most_to_go[node])
        price = np.zeros(len(first))
        np.add.at(price, of_row, self._price)
        return _Groups(of_row.astype(np.int64), first.astype(np.int64), most, enough, price)

    def _reaching(self, node: int, nodes: list[_Labels], groups: list[_Groups]) -> _Labels:
        """The labels of all edges into a node, those left out that cannot be part of a better plan."""
        here = groups[node]
        parts = [self._promising(node, here, self._moved(here, nodes[node - 1], groups[node - 1]))]
        for start, edges in self._edges_into(node):
            moved = self._moved(here, nodes[start], groups[start])
            longer = self._along(here, moved, edges[~self._switching[edges]])
            parts += [self._promising(node, here, longer)]
            for edge in edges[self._switching[edges]].tolist():
                longer = self._switched(here, self._along(here, moved, ints([edge])), edge)
                parts.append(self._promising(node, here, longer))
        return _Labels.together(parts)

    def _edges_into(self, node: int) -> Iterator[tuple[int, Ints]]:
        """Edges by where they start."""
        low, high = self._paths.into[node : node + 2].tolist()
        starts = self._paths.start[low:high]
        bounds = [low, *(low + 1 + np.flatnonzero(np.diff(starts))).tolist(), high] if low < high else []
        for begin, end in pairwise(bounds):
            yield int(self._paths.start[begin]), np.arange(begin, end)

    def _moved(self, here: _Groups, labels: _Labels, there: _Groups) -> _Labels:
        """Labels of another node in the groups of this one, when nothing is added."""
        count = len(labels.seconds)
        added = labels.added[:, there.of_row[here.first]]
        return replace(labels, added=added, edge=np.full(count, NEVER, dtype=np.int64), before=np.arange(count))

    def _along(self, here: _Groups, labels: _Labels, edges: Ints) -> _Labels:
        """Each of some labels along each of some edges."""
        which = np.tile(np.arange(len(labels.seconds)), len(edges))
        by = np.repeat(edges, len(labels.seconds))
        longer = labels.at(which)
        added = longer.added + self._ledger.added[by[:, None], here.first[None]]
        return replace(longer, seconds=longer.seconds + self._seconds[by], added=added, edge=by)

    def _promising(self, node: int, here: _Groups, labels: _Labels) -> _Labels:
        # At best counts room that is left over as time saved, so what has been spent is compared as well.
        fast = (labels.seconds < self._better_than_s) & (self._at_best(node, here, labels) < self._better_than_s)
        return labels.at(ints(np.flatnonzero((labels.added <= here.most).all(axis=1) & fast)))

    def _switched(self, here: _Groups, labels: _Labels, edge: int) -> _Labels:
        for i, switch in enumerate(self._ledger.switches):
            if edge in switch.off or edge in switch.on:
                counted = labels.gone[:, i] & labels.held[:, i]
                gone, held = labels.gone.copy(), labels.held.copy()
                gone[:, i] |= edge in switch.off
                held[:, i] |= edge in switch.on
                new = gone[:, i] & held[:, i] & ~counted
                labels = replace(labels, gone=gone, held=held, added=labels.added + new[:, None] * switch.bytes[here.first])
        return labels

    def _at_best(self, node: int, groups: _Groups, labels: _Labels) -> Floats:
        """The least time that each label can come to."""
        best: Floats = labels.seconds + labels.added @ groups.price + self._to_go_s[node]
        return best

    def _state(self, node: int, labels: _Labels) -> Flags:
        """Of the switches what still makes a difference: what is gone and may be held later, and the other way round."""
        off, on = self._last_off >= node, self._last_on >= node
        return np.concatenate([(labels.gone & ~labels.held)[:, on], (labels.held & ~labels.gone)[:, off]], axis=1)

    def _kept(self, node: int, groups: _Groups, labels: _Labels) -> _Labels:
        """The labels that no other is better than, as many as there is room for."""
        kept = labels.at(_undominated(labels.seconds, np.maximum(labels.added, groups.enough), self._state(node, labels)))
        if len(kept.seconds) <= self._width:
            return kept
        at_best = self._at_best(node, groups, kept)
        order = np.argsort(at_best, kind="stable")
        self._cut_s = min(self._cut_s, float(at_best[order[self._width]]))
        return kept.at(np.sort(order[: self._width]))

    def _traced_back(self, nodes: list[_Labels], label: int) -> tuple[int, ...]:
        node, edges = self._paths.nodes - 1, []
        while node:
            edge, label = int(nodes[node].edge[label]), int(nodes[node].before[label])
            edges += [edge] if edge != NEVER else []
            node = int(self._paths.start[edge]) if edge != NEVER else node - 1
        return tuple(edges[::-1])


def _undominated(seconds: Floats, added: Ints, state: Flags) -> Ints:
    """Of labels in the same state those to which no other is equal or better in time and all bytes."""
    if not len(seconds):
        return ints(())
    added = added[:, (added != added[0]).any(axis=0)]
    _, kind = np.unique(state, axis=0, return_inverse=True) if state.shape[1] else (None, np.zeros(len(seconds), dtype=np.int64))
    order = np.lexsort((*added.T[::-1], seconds))
    kept = [_of_one_kind(added, order[kind.reshape(-1)[order] == k]) for k in range(int(kind.max()) + 1)]
    return ints(np.sort(np.concatenate(kept)))


def _of_one_kind(added: Ints, order: Ints) -> Ints:
    """Without those to which one before in the order is no more anywhere."""
    if added.shape[1] == 0:
        return order[:1]
    if added.shape[1] == 1:
        column = added[order, 0]
        before = np.minimum.accumulate(np.concatenate([[np.iinfo(np.int64).max], column[:-1]]))
        return ints(order[column < before])
    kept = order[:0]
    for i in range(0, len(order), _CHUNK):
        chunk = order[i : i + _CHUNK]
        chunk = chunk[~_no_more(added, kept, chunk).any(axis=1)]
        chunk = chunk[~np.tril(_no_more(added, chunk, chunk), -1).any(axis=1)]
        kept = np.concatenate([kept, chunk])
    return kept


def _no_more(added: Ints, rivals: Ints, chunk: Ints) -> Flags:
    """Which rivals have no more anywhere: ``(chunk, rivals)``."""
    found = np.ones((len(chunk), len(rivals)), dtype=np.bool_)
    for column in added.T:
        found &= column[rivals][None] <= column[chunk][:, None]
    return found
