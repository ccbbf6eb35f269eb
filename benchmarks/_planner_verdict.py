"""What the rows of one model come to: ours against the best peer at the same measured peak."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

GOALS = {"gpt": {25: 0.90, 40: 0.70, 50: 0.60, 60: 0.55, 75: 0.40}}
OTHERS = 0.70


@dataclass(frozen=True)
class Point:
    """A side as measured.

    Attributes:
        family: of sides that are one way to trade memory for time.
        percent: the budget.
        peak, over: share of the plain peak, and time over plain.
        predicted_peak, predicted_over: where it predicts them.
    """

    family: str
    percent: int
    peak: float
    over: float
    predicted_peak: float | None = None
    predicted_over: float | None = None


def at_peak(points: Sequence[Point], peak: float) -> float | None:
    """The overhead of a family at a peak: on the line between its neighbours, or of its point of the largest peak below."""
    peaks = sorted({p.peak for p in points})
    known = [(size, statistics.median(p.over - 1 for p in points if p.peak == size)) for size in peaks]
    for (low, dear), (high, cheap) in pairwise(known):
        if low <= peak < high:
            return dear + (cheap - dear) * (peak - low) / (high - low)
    below = [over for size, over in known if size <= peak]
    return below[-1] if below else None


def verdicts(model: str, points: Sequence[Point]) -> Iterator[str]:
    """A line for each budget."""
    peers = {p.family: [q for q in points if q.family == p.family] for p in points if p.family != "lowtide"}
    for ours in (p for p in points if p.family == "lowtide"):
        found = {name: over for name, family in peers.items() if (over := at_peak(family, ours.peak)) is not None}
        line = f"  {ours.percent} %: "
        if found:
            best = min(found, key=lambda name: found[name])
            goal = GOALS.get(model, {}).get(ours.percent, OTHERS)
            ratio = (ours.over - 1) / found[best] if found[best] > 0 else float("inf")
            line += f"overhead {ours.over - 1:.3f} / {found[best]:.3f} of {best} at the same peak = {ratio:.2f} (goal {goal:.2f})"
        else:
            line += f"overhead {ours.over - 1:.3f}, no peer gets there"
        assert ours.predicted_peak
        assert ours.predicted_over
        line += f"; within budget: {'yes' if ours.peak <= ours.percent / 100 else 'NO'}"
        yield line + f"; measured over predicted: peak {ours.peak / ours.predicted_peak:.4f}, time {ours.over / ours.predicted_over:.3f}"
