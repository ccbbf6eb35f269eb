"""What a step was measured to take."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.measure._timing import Times


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peak and time of a step, measured on real steps.

    Attributes:
        peak_bytes: most bytes alive on the device at once.
        step_s: median time of a step.
        spread_s: distance between the quartiles of the times.
        replay_s: of ``step_s``, what went into replays.
        steps: how many steps were timed.
    """

    peak_bytes: int
    step_s: float
    spread_s: float
    replay_s: float
    steps: int

    @classmethod
    def of(cls, peak_bytes: int, times: Times, replay_s: float = 0.0) -> Measurement:
        """Put a peak and times together."""
        return cls(peak_bytes, times.median_s, times.spread_s, replay_s, len(times.seconds))
