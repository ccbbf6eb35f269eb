"""The ways to split one graph into forward and backward that are worth a choice.

Every stretch of the graph has options, and each option changes the bytes alive at every moment of the step. The fastest choice with no
moment over a budget is a small integer program, with a constraint for each moment; moments are added as the timelines of its answers show
them to be over budget. It is solved for a row of budgets, from what the fastest split needs down to the least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lowtide.compiled._programs import fastest
from lowtide.compiled._stretches import Stretches
from lowtide.compiled._timeline import Timeline, Timelines

_BUDGETS = 24
_ROUNDS = 6
"""How often an answer is corrected by its timeline."""
_FIRST_MOMENTS = 24


@dataclass(frozen=True)
class Way:
    """One way to split a graph.

    Attributes:
        saved: names of the nodes that forward saves.
        saved_bytes: of those, without parameters.
        forward_bytes, backward_bytes: the most alive in forward and in backward, beyond what was there before.
        seconds: for the replays, and for writing what would else be in no memory.
    """

    saved: tuple[str, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most alive at any time."""
        return max(self.forward_bytes, self.backward_bytes)


class Search:
    """Looks for the ways of one graph."""

    def __init__(self, timelines: Timelines, stretches: Stretches, own: Iterable[frozenset[int]]) -> None:
        """Find out what each option does to one split.

        Args:
            timelines: of the graph.
            stretches: of the graph.
            own: sets of saved values that PyTorch would choose.
        """
        self._timelines, self._stretches = timelines, stretches
        self._options = stretches.options()
        quickest = {(o.first, o.last): o for o in reversed(self._options) if o.last == o.first + 1}
        self._base = frozenset[int]().union(*(option.saved for option in quickest.values()))
        self._at_base = timelines.of(self._base)
        self._found = {t.saved: t for t in map(timelines.of, [self._base, *own, *stretches.whole(), frozenset()])}
        self._measure_options()
        levels = self._at_base.levels
        self._moments = sorted({int(np.argmax(levels)), *np.linspace(0, len(levels) - 1, _FIRST_MOMENTS).astype(int).tolist()})

    def timelines(self) -> list[Timeline]:
        """Those that no other beats in time, in peak and in saved bytes, from the fastest on."""
        if self._at_base.possible:
            top, least = max(t.peak_bytes for t in self._found.values()), self._least()
            for budget in np.linspace(top, least, _BUDGETS):
                self._solve(float(budget))
        return _undominated(self._found.values())

    def _measure_options(self) -> None:
        base, options, changes, seconds = self._at_base, [], [], []
        for option in self._options:
            inside = frozenset(self._stretches.nodes(option.first, option.last))
            timeline = self._timelines.of((self._base - inside) | option.saved)
            if timeline.possible:
                options.append(option)
                changes.append(timeline.levels - base.levels)
                seconds.append(timeline.seconds - base.seconds)
        self._options, self._changes, self._seconds = options, np.array(changes, dtype=np.float64), np.array(seconds)
        self._flow = np.zeros((self._stretches.places, len(options)))
        for k, option in enumerate(options):
            self._flow[[option.first, option.last], k] += 1, -1
        self._ends = np.zeros(self._stretches.places)
        self._ends[[0, -1]] = 1, -1

    def _least(self) -> int:
        """The smallest peak that is found."""
        for _ in range(_ROUNDS):
            timeline, is_new = self._choose(None)
            if timeline is None or not is_new:
                break
        return min(t.peak_bytes for t in self._found.values() if t.possible)

    def _solve(self, budget: float) -> None:
        allowed = budget
        for _ in range(_ROUNDS):
            timeline, is_new = self._choose(allowed)
            over = 0.0 if timeline is None else timeline.peak_bytes - budget
            if over <= 0:
                return
            if not is_new:
                allowed -= over  # the options together do more than the sum of what each does

    def _choose(self, budget: float | None) -> tuple[Timeline | None, bool]:
        """The timeline of the best choice, and whether its highest moment is one that was not looked at before."""
        adds, level = self._changes[:, self._moments].T, self._at_base.levels[self._moments].astype(np.float64)
        chosen = fastest(self._seconds, self._flow, self._ends, adds, level, budget)
        if chosen is None:
            return None, False
        timeline = self._timelines.of(frozenset[int]().union(*(self._options[k].saved for k in chosen)))
        self._found[timeline.saved] = timeline
        moment = int(np.argmax(timeline.levels))
        is_new = moment not in self._moments
        if is_new:
            self._moments.append(moment)
        return timeline, is_new


def _undominated(timelines: Iterable[Timeline]) -> list[Timeline]:
    found: list[Timeline] = []
    possible = (t for t in timelines if t.possible)
    for new in sorted(possible, key=lambda t: (t.seconds, t.peak_bytes, t.saved_bytes)):
        if not any(t.peak_bytes <= new.peak_bytes and t.saved_bytes <= new.saved_bytes for t in found):
            found.append(new)
    return found
