"""Ways for all graphs of a step at once, each faster than all of smaller peak.

Graphs run forward one after the other, and backward in the opposite order. While one runs, what the earlier ones have saved is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.compiled._menu import Way
from lowtide.compiled._programs import fastest

_RUNGS = 32


@dataclass(frozen=True)
class Rung:
    """A way for each graph of a step.

    Attributes:
        ways: in the order in which the graphs run forward.
        peak_bytes: the most alive by the timelines, beyond what was there before.
        seconds: what all the ways take.
    """

    ways: tuple[Way, ...]
    peak_bytes: int
    seconds: float

    @property
    def saved_bytes(self) -> int:
        """What all graphs save."""
        return sum(way.saved_bytes for way in self.ways)

    @classmethod
    def of(cls, ways: Sequence[Way]) -> Rung:
        """The rung of some ways."""
        before = np.cumsum([0, *(way.saved_bytes for way in ways)])[:-1]
        peak = max((int(b) + way.peak_bytes for b, way in zip(before, ways, strict=True)), default=0)
        return cls(tuple(ways), peak, sum(way.seconds for way in ways))


def ladder(menus: Sequence[Sequence[Way]]) -> list[Rung]:
    """From the fastest to the one of least peak.

    Args:
        menus: the ways that each graph has, graphs in the order in which they run forward.
    """
    if len(menus) == 1:
        rungs = [Rung.of([way]) for way in menus[0]]
        return _ascending(rungs, rungs[0])
    of, ways = [i for i, menu in enumerate(menus) for _ in menu], [way for menu in menus for way in menu]
    seconds = np.array([way.seconds for way in ways])
    take = np.array([[float(i == each) for i in of] for each in range(len(menus))])
    adds = np.array(
        [
            [float(way.saved_bytes if i < each else way.peak_bytes if i == each else 0) for i, way in zip(of, ways, strict=True)]
            for each in range(len(menus))
        ]
    )

    def best(budget: float | None) -> Rung | None:
        chosen = fastest(seconds, take, np.ones(len(menus)), adds, np.zeros(len(menus)), budget)
        return None if chosen is None else Rung.of([ways[k] for k in chosen])

    quickest, leanest = Rung.of([menu[0] for menu in menus]), best(None)
    assert leanest is not None  # any way of each is a choice
    # Timelines are not exact: what saves the least is a choice whatever its peak is said to be.
    saving = Rung.of([min(menu, key=lambda way: way.saved_bytes) for menu in menus])
    others = [best(float(b)) for b in np.linspace(quickest.peak_bytes, leanest.peak_bytes, _RUNGS)]
    return _ascending([quickest, leanest, *(rung for rung in others if rung is not None)], saving)


def _ascending(rungs: list[Rung], always: Rung) -> list[Rung]:
    found: list[Rung] = []
    for rung in sorted(rungs, key=lambda r: (r.seconds, r.peak_bytes)):
        if not found or rung.peak_bytes < found[-1].peak_bytes:
            found.append(rung)
    return found if any(rung.ways == always.ways for rung in found) else sorted([*found, always], key=lambda r: r.seconds)
