"""What a step was measured to take."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.measure._timing import Times


@dataclass(frozen=True, slots=True)
class Measurement:
    """Peak and time of a step, measured on real steps. What was not measured, or cannot be on this device, is ``None``.

    Attributes:
        peak_bytes: most bytes alive on the device at once, as the allocator counts them.
        step_s: median time of a step.
        spread_s: distance between the quartiles of the times.
        replay_s: of ``step_s``, what went into replays.
        steps: how many steps were timed.
        reserved_bytes: on CUDA, the most that the caching allocator had taken from the device.
        phase_peaks: the peak within each phase: ``"forward"``, ``"backward"``, ``"optimizer"``, and on the CPU ``"replay"``.
        tokens_per_s: tokens trained on in a second, when it was told how many a step has.
        live_bytes: bytes of all tensors that are alive between two steps.
        resident_set_bytes: on the CPU, the most memory that the process had while a step ran.
    """

    peak_bytes: int
    step_s: float
    spread_s: float
    replay_s: float
    steps: int
    reserved_bytes: int | None = None
    phase_peaks: tuple[tuple[str, int], ...] = ()
    tokens_per_s: float | None = None
    live_bytes: int | None = None
    resident_set_bytes: int | None = None

    @classmethod
    def of(cls, peak_bytes: int, times: Times) -> Measurement:
        """Put a peak and times together."""
        return cls(peak_bytes, times.median_s, times.spread_s, times.replay_s, len(times.seconds))

    @property
    def replay_share(self) -> float:
        """Share of the step's time that went into replays."""
        return self.replay_s / self.step_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two steps measured in turns.

    Attributes:
        step, against: what each was measured to take.
        time_ratio: time of the one over time of the other, median of pairs.
    """

    step: Measurement
    against: Measurement
    time_ratio: float

    @property
    def peak_ratio(self) -> float:
        """Peak of the one over peak of the other."""
        return self.step.peak_bytes / self.against.peak_bytes
