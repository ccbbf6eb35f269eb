"""What a byte is worth in each watched moment: the multipliers of the Lagrangian bound.

With a price on bytes over budget the cheapest path is found without regard to budgets, and what it costs, less the price of the
budgets, is a lower bound on the time of any path that is within them. The best prices maximise that bound; it is concave in them, so
cutting planes find its maximum (Kelley 1960, "The cutting-plane method for solving convex programs"). The bound is that of the
linear relaxation over paths, which is tight but for one edge or so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowtide.plan import _scipy as scipy
from lowtide.plan._index import Floats
from lowtide.plan.solvers._ledger import Ledger
from lowtide.plan.solvers._quiet import quiet

_MOST_CUTS = 40
_MOST_KNOWN = 60
_REL_TOLERANCE = 1e-5


@dataclass
class Multipliers:
    """Prices of bytes, found for one set of rows after another; paths that were met on the way are kept.

    Attributes:
        seconds: of each edge.
        known: paths met lately, as edges; the first takes none.
    """

    seconds: Floats
    known: list[list[int]] = field(default_factory=lambda: [[]])

    def best(self, ledger: Ledger, budget_bytes: int) -> Floats:
        """Seconds a byte for each row."""
        # In units of the budget and of the time of everything, so that the prices are of the order of 1.
        unit_s, unit = float(self.seconds.sum()) or 1.0, float(max(budget_bytes, 1))
        added = ledger.added / unit
        over = (ledger.base - budget_bytes) / unit
        self.known = self.known[:1] + self.known[1:][-_MOST_KNOWN:]
        cuts = [self._cut(edges, added, over, unit_s) for edges in self.known]
        best, price = -np.inf, np.zeros(ledger.row_count)
        for _ in range(_MOST_CUTS):
            tried, most = _master(cuts, ledger.row_count)
            value, edges = ledger.paths.cheapest(self.seconds / unit_s + added @ tried)
            value += float(over @ tried)
            if value > best:
                best, price = value, tried
            if most - best <= _REL_TOLERANCE * max(abs(best), 1e-3):
                break
            self.known.append(edges)
            cuts.append(self._cut(edges, added, over, unit_s))
        return price * unit_s / unit

    def _cut(self, edges: list[int], added: Floats, over: Floats, unit_s: float) -> Floats:
        """A path's time, and its bytes over budget in each row."""
        return np.concatenate([[self.seconds[edges].sum() / unit_s], over + added[edges].sum(axis=0)])


_DEAREST = 1e3
"""Where no path is within the budgets, prices would grow for ever."""


def _master(cuts: list[Floats], rows: int) -> tuple[Floats, float]:
    """The prices for which the lowest cut is highest, and its height."""
    table = np.stack(cuts)
    matrix = np.concatenate([np.ones((len(table), 1)), -table[:, 1:]], axis=1)
    with quiet():
        result: Any = scipy.optimize.linprog(
            np.concatenate([[-1.0], np.zeros(rows)]),
            A_ub=matrix,
            b_ub=table[:, 0],
            bounds=[(None, None), *[(0.0, _DEAREST)] * rows],
            method="highs",
        )
    if result.x is None:
        return np.zeros(rows), np.inf
    return result.x[1:], float(result.x[0])
