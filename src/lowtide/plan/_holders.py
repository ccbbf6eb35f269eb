"""When is a storage alive that is naturally gone: unions of holders as linear expressions of the choice.

A holder is there or not: a saved tensor is there unless one of the regions that drop it is chosen; a region is there
when it is chosen. Of regions that exclude each other at most one is chosen, so their union is their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import sparse

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
        clash: which of them exclude each other.
    """

    count: int
    clash: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    extra: int = 0
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
            self._unions[key] = self._union(_minimal(dropped_by), holders)
        return self._unions[key]

    def _union(self, dropped_by: Sequence[Choices], holders: Choices) -> int:
        parts = [Linear(1.0, tuple((c, -1.0) for c in sorted(drops - holders))) for drops in dropped_by]
        if any(not part.weights for part in parts):
            return ALWAYS
        parts += [Linear(0.0, tuple((c, 1.0) for c in group)) for group in self._exclusive(self._unmatched(dropped_by, holders))]
        return self._number(parts[0]) if len(parts) == 1 else self._at_least(parts)

    def _unmatched(self, dropped_by: Sequence[Choices], holders: Choices) -> list[int]:
        """Holders that some saved tensor does not stand in for: it is there whenever the holder is chosen."""
        return [h for h in sorted(holders) if not any(h in drops or self.clash[h, sorted(drops)].all() for drops in dropped_by)]

    def _exclusive(self, holders: Sequence[int]) -> list[list[int]]:
        groups: list[list[int]] = []
        for holder in holders:
            home = next((g for g in groups if self.clash[holder, g].all()), None)
            if home is None:
                groups.append([holder])
            else:
                home.append(holder)
        return groups

    def _number(self, expression: Linear) -> int:
        return self._numbers.setdefault(expression, len(self._numbers))

    def _at_least(self, parts: Sequence[Linear]) -> int:
        variable = self.count + self.extra
        self.extra += 1
        self._ties += [(variable, part) for part in parts]
        return self._number(Linear(0.0, ((variable, 1.0),)))

    def __len__(self) -> int:
        return len(self._numbers)

    def table(self) -> tuple[sparse.csr_array, Floats]:
        """Weights ``(expressions, variables)`` and constants ``(expressions,)``."""
        known = list(self._numbers)
        return self._matrix([k.weights for k in known]), np.array([k.constant for k in known])

    def ties(self) -> tuple[sparse.csr_array, Floats]:
        """``matrix @ v >= floor``: each extra variable is at least each part of its union."""
        rows = [((variable, 1.0), *((c, -w) for c, w in part.weights)) for variable, part in self._ties]
        return self._matrix(rows), np.array([part.constant for _, part in self._ties])

    def _matrix(self, rows: Sequence[Sequence[tuple[int, float]]]) -> sparse.csr_array:
        at = [i for i, row in enumerate(rows) for _ in row]
        entries = [entry for row in rows for entry in row]
        shape = (len(rows), self.count + self.extra)
        return sparse.csr_array(sparse.coo_array(([w for _, w in entries], (at, [v for v, _ in entries])), shape=shape))


def _minimal(dropped_by: frozenset[Choices]) -> list[Choices]:
    """Saved tensors that more candidates drop are there less often: those with the fewest say it all."""
    return [d for d in sorted(dropped_by, key=sorted) if not any(other < d for other in dropped_by)]
