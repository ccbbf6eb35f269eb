"""The bytes alive at every moment that can be the peak, for solvers that want them all at once (see ``_live``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lowtide.plan import _scipy as scipy
from lowtide.plan._candidate import Candidate
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._dominance import undominated
from lowtide.plan._index import Floats, Ints, TraceIndex
from lowtide.plan._live import LiveBytes, Rows


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
    rows: scipy.sparse.csr_array
    constant: Floats
    at_least: scipy.sparse.csr_array
    floor: Floats
    cliques: tuple[tuple[int, ...], ...]

    @cached_property
    def seconds(self) -> Floats:
        """Replay time of each candidate."""
        return np.array([c.seconds for c in self.candidates], dtype=np.float64)

    def only(self, places: Ints) -> MemoryModel:
        """The same with some of the candidates alone (ascending)."""
        columns = np.concatenate([places, len(self.candidates) + np.arange(self.extra)])
        renamed = {place: i for i, place in enumerate(places.tolist())}
        groups = ([renamed[c] for c in group if c in renamed] for group in self.cliques)
        return replace(
            self,
            candidates=tuple(self.candidates[i] for i in places.tolist()),
            rows=self.rows[:, columns],
            at_least=self.at_least[:, columns],
            cliques=tuple({tuple(group) for group in groups if len(group) > 1}),
        )


def memory_model(index: TraceIndex, found: Sequence[Candidate]) -> MemoryModel:
    """Build the model for these candidates."""
    conflicts = Conflicts(found)
    live = LiveBytes(index, found, conflicts)
    rows = Rows.in_time([live.between_changes(), live.in_replays(list(live.gaps))])
    kept = undominated(rows.weights, rows.constant, conflicts.cliques)
    at_least, floor = live.known.ties()
    return MemoryModel(
        candidates=tuple(found),
        extra=live.known.extra,
        rows=scipy.sparse.csr_array(rows.weights[kept]),
        constant=rows.constant[kept],
        at_least=at_least,
        floor=floor,
        cliques=tuple(map(tuple, conflicts.cliques)),
    )
