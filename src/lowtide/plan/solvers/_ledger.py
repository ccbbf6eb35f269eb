"""What each edge of a path adds to the bytes of the moments that are watched, and how much of it a search has to remember.

Of all moments of a step only those that some plan was over budget in are watched: rows are added as they are found to matter
(Dantzig, Fulkerson and Johnson 1954 added cuts to their tours so). Bytes are whole numbers throughout, so that equal is equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan._holders import Choices
from lowtide.plan._index import Ints
from lowtide.plan._live import Rows
from lowtide.plan._path import Paths


@dataclass(frozen=True)
class Switch:
    """A storage that one edge of a path lets go of (at most one can), and that others hold: it is there if one of those is taken as well.

    Attributes:
        off, on: edges that let go of it, and that hold it.
        gone_at_first: it is there for no other reason than that it is held.
        bytes: ``(rows,)`` that it adds when it is let go of and held.
    """

    off: frozenset[int]
    on: frozenset[int]
    gone_at_first: bool
    bytes: Ints


@dataclass(frozen=True)
class Ledger:
    """Bytes by watched row and edge.

    Attributes:
        paths: the edges.
        added: ``(edges, rows)``, switches left out.
        base: ``(rows,)`` bytes alive when no edge is taken.
        switches: see there.
    """

    paths: Paths
    added: Ints
    base: Ints
    switches: tuple[Switch, ...]

    @staticmethod
    def of(paths: Paths, rows: Rows, unions: Sequence[tuple[Choices | None, Choices]]) -> Ledger:
        """From rows of live bytes, whose extra variables are ``unions``."""
        count = len(paths.candidate)
        edge_of = np.empty(count, dtype=np.int64)
        edge_of[paths.candidate] = np.arange(count)
        weights, base = np.rint(rows.weights).astype(np.int64), np.rint(rows.constant).astype(np.int64)
        added = weights[:, :count][:, paths.candidate].T.copy()
        switches = []
        for i, (drops, holders) in enumerate(unions):
            size = weights[:, count + i]
            off, on = (frozenset(edge_of[sorted(group)].tolist()) for group in (drops or (), holders))
            if drops is not None:
                base = base + size
                added[sorted(off)] -= size
            switches.append(Switch(off, on, drops is None, size))
        return Ledger(paths, added, base, tuple(s for s in switches if s.bytes.any()))

    @property
    def row_count(self) -> int:
        return len(self.base)

    @cached_property
    def histories(self) -> Ints:
        """By node and row a number that is equal for rows to which all edges so far add the same: ``(nodes, rows)``.

        It is a sum of what edges add, each times a random number of 64 bits.
        """
        draw = np.random.default_rng(0)
        terms = self.added * _numbers(draw, len(self.added))[:, None]
        for switch in self.switches:
            edges = sorted(switch.on | switch.off)
            terms[edges] += switch.bytes * _numbers(draw, len(edges))[:, None]
        total = np.concatenate([np.zeros((1, self.row_count), dtype=np.int64), terms.cumsum(axis=0)])
        return total[self.paths.into[1:]]

    @cached_property
    def least_to_go(self) -> Ints:
        """From each node, the fewest bytes that the rest of a path adds to each row: ``(nodes, rows)``."""
        return np.rint(self.paths.least_to_go(self.added.astype(np.float64))).astype(np.int64)

    @cached_property
    def most_to_go(self) -> Ints:
        """The most bytes that it adds."""
        most = -np.rint(self.paths.least_to_go(-self.added.astype(np.float64))).astype(np.int64)
        return most + sum((np.maximum(s.bytes, 0) for s in self.switches), start=np.zeros(self.row_count, dtype=np.int64))


def _numbers(draw: np.random.Generator, count: int) -> Ints:
    return draw.integers(-(2**63), 2**63 - 1, size=count, dtype=np.int64)
