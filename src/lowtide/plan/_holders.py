"""When is a storage alive that is naturally gone: unions of holders as linear expressions of the choice.

A holder is there or not: a saved tensor is there unless one of the regions that drop it is chosen; a region is there
when it is chosen. Of regions that exclude each other at most one is chosen, so their union is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lowtide.plan import _scipy as scipy
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._index import Floats

Choices = frozenset[int]
ALWAYS = 0
"""The expression that is 1 whatever is chosen."""


@dataclass(frozen=True)
class Linear:
    """``constant + sum of weight * variable``."""

    constant: float
    weights: tuple[tuple[int, float], ...] = ()


@dataclass
class Expressions:
    """Expressions over candidates, numbered, each once; grows extra variables where a union needs one.

    Attributes:
        count: number of candidates: the first variables.
        conflicts: which of them exclude each other.
        unions: of each extra variable, the candidates that drop every saved tensor (``None`` where there is none), and those that hold.
    """

    count: int
    conflicts: Conflicts
    unions: list[tuple[Choices | None, Choices]] = field(default_factory=list)
    _numbers: dict[Linear, int] = field(default_factory=lambda: {Linear(1.0): ALWAYS})
    _unions: dict[tuple[frozenset[Choices], Choices], int] = field(default_factory=dict)
    _ties: list[tuple[int, Linear]] = field(default_factory=list)

    def chosen(self, candidate: int) -> int:
        """The expression that is 1 when the candidate is chosen."""
        return self._number(Linear(0.0, ((candidate, 1.0),)))

    def union(self, dropped_by: frozenset[Choices], holders: Choices) -> int:
        """The expression that is 1 when a holder is there.

        Args:
            dropped_by: for each saved tensor, the candidates that drop it.
            holders: candidates that hold the storage themselves.
        """
        key = (dropped_by, holders)
        if key not in self._unions:
            self._unions[key] = self._union(dropped_by, holders)
        return self._unions[key]

    def _union(self, dropped_by: frozenset[Choices], holders: Choices) -> int:
        # All that drop a tensor of one storage run the op that made it: one of them at most is chosen, so that everything is dropped
        # when one is chosen that drops everything.
        drops = frozenset.intersection(*dropped_by) - holders if dropped_by else None
        if drops is not None and not drops:
            return ALWAYS
        parts = [] if drops is None else [Linear(1.0, tuple((c, -1.0) for c in sorted(drops)))]
        unmatched = self._unmatched(drops, holders)
        parts += [Linear(0.0, tuple((c, 1.0) for c in group)) for group in self._exclusive(unmatched)]
        return self._number(parts[0]) if len(parts) == 1 else self._at_least(parts, drops, unmatched)

    def _unmatched(self, drops: Choices | None, holders: Choices) -> list[int]:
        """Holders that the saved tensors do not stand in for: those are there whenever the holder is chosen."""
        if drops is None:
            return sorted(holders)
        keys = self.conflicts.keys
        common = frozenset.intersection(*(keys[d] for d in drops))  # the call that made the storage
        return [h for h in sorted(holders) if keys[h].isdisjoint(common) and not self.conflicts.all_exclude(h, drops)]

    def _exclusive(self, holders: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        for holder in holders:
            home = next((g for g in groups if self.conflicts.all_exclude(holder, g)), None)
            if home is None:
                groups.append([holder])
            else:
                home.append(holder)
        return groups

    def _number(self, expression: Linear) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def _at_least(self, parts: Sequence[Linear], drops: Choices | None, holders: Sequence[int]) -> int:
        variable = self.count + self.extra
        self.unions.append((drops, frozenset(holders)))
        self._ties += [(variable, part) for part in parts]
        return self._number(Linear(0.0, ((variable, 1.0),)))

    @property
    def extra(self) -> int:
        """Number of extra variables."""
        return len(self.unions)

    def __len__(self) -> int:
        return len(self._numbers)

    def table(self) -> tuple[scipy.sparse.csr_array, Floats]:
        """Weights ``(expressions, variables)`` and constants ``(expressions,)``."""
        known = list(self._numbers)
        return self._matrix([k.weights for k in known]), np.array([k.constant for k in known])

    def ties(self) -> tuple[scipy.sparse.csr_array, Floats]:
        """``matrix @ v >= floor``: each extra variable is at least each part of its union."""
        rows = [((variable, 1.0), *((c, -w) for c, w in part.weights)) for variable, part in self._ties]
        return self._matrix(rows), np.array([part.constant for _, part in self._ties])

    def _matrix(self, rows: Sequence[Sequence[tuple[int, float]]]) -> scipy.sparse.csr_array:
        at = [i for i, row in enumerate(rows) for _ in row]
        entries = [entry for row in rows for entry in row]
        shape = (len(rows), self.count + self.extra)
        return scipy.sparse.csr_array(scipy.sparse.coo_array(([w for _, w in entries], (at, [v for v, _ in entries])), shape=shape))
