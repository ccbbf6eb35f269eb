"""The ways to compile a step, from the fastest to the leanest by prediction, and which of them to compile next for a budget."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.compiled._ladder import Rung

_ENOUGH_TRIES = 3
"""Once something within the budget is found, faster ways are looked for until so many were compiled."""
_CLOSE = 0.02
"""Of the budget: a faster way that is predicted to be over it by no more is tried as well."""
_FAR = 0.1
"""Of the budget: what is predicted to be over it by more is tried only where nothing is within, if it is the leanest or PyTorch's own."""
_RIVALS = 2
"""So many of PyTorch's own ways are to be within the budget."""
_RIVALS_TRIED = 3


class Candidates:
    """What can be compiled, and what was measured of it.

    Attributes:
        rungs: by predicted time.
        peaks: measured, by number.
    """

    def __init__(self, ladder: Sequence[Rung], by_torch: Sequence[Rung]) -> None:
        """Have nothing measured yet.

        Args:
            ladder: ways that are worth a choice.
            by_torch: what PyTorch makes of the step, without a budget and at settings of its knob.
        """
        plain, distinct = by_torch[0], dict[object, Rung]()
        for rung in (*by_torch, *ladder):
            distinct.setdefault(rung.ways, rung)
        worth = [r for r in distinct.values() if r is plain or r.seconds < plain.seconds or r.peak_bytes < plain.peak_bytes]
        self.rungs = sorted(worth, key=lambda rung: (rung.seconds, rung.peak_bytes))
        self.peaks: dict[int, int] = {}
        self.plain = self.rungs.index(plain)
        self._by_torch = [k for k, rung in enumerate(self.rungs) if rung.ways in {r.ways for r in by_torch}]
        numbers = range(len(self.rungs))
        self._lean = {min(numbers, key=lambda k: self.rungs[k].peak_bytes), min(numbers, key=lambda k: self.rungs[k].saved_bytes)}

    def number(self, rung_ways: object) -> int | None:
        """Of the rung of some ways, if there is one."""
        return next((k for k, rung in enumerate(self.rungs) if rung.ways == rung_ways), None)

    def within(self, allowed: int) -> list[int]:
        """Those that were measured within a budget."""
        return sorted(k for k, peak in self.peaks.items() if peak <= allowed)

    def predicted(self, k: int) -> int:
        """The peak of a rung, by its timeline and what was measured of the one nearest to it."""
        nearest = min(self.peaks, key=lambda j: abs(self.rungs[j].peak_bytes - self.rungs[k].peak_bytes))
        return self.rungs[k].peak_bytes + self.peaks[nearest] - self.rungs[nearest].peak_bytes

    def next(self, allowed: int, tries: int) -> int | None:
        """The rung to compile next, if any: the fastest that may be within the budget and is faster than all that are.

        Args:
            allowed: the budget.
            tries: how many were compiled for it so far.
        """
        within = self.within(allowed)
        left = [k for k in range(min(within, default=len(self.rungs))) if k not in self.peaks]
        # Peaks come in steps: what several predictions in a row have missed is further away than they say.
        most = allowed * (1 + _CLOSE) if within else allowed * (1 - _CLOSE * tries)
        likely = [k for k in left if self.predicted(k) <= most]
        if within and tries > _ENOUGH_TRIES:
            return None
        if likely or within:
            return next(iter(likely), None)
        resorts = [k for k in left if k in self._lean or k in self._by_torch or self.predicted(k) <= allowed * (1 + _FAR)]
        return min(resorts, key=self.predicted, default=None)

    def next_rival(self, allowed: int, tried: Sequence[int]) -> int | None:
        """Another rung to compile that may turn out to be faster than what was predicted to be the fastest, if any.

        What PyTorch makes of it, and the next fastest by prediction.

        Args:
            allowed: the budget.
            tried: those that this returned before.
        """
        within = set(self.within(allowed))
        left = [k for k in self._by_torch if k not in self.peaks and self.predicted(k) <= allowed * (1 + _FAR)]
        if left and len(within.intersection(self._by_torch)) < _RIVALS and len(tried) < _RIVALS_TRIED:
            return left[0]
        following = [k for k in range(min(within) + 1, len(self.rungs)) if k not in self._by_torch]
        second = next((k for k in following if k in within or self.predicted(k) <= allowed), None)
        return None if second in self.peaks or second in tried else second
