"""Times of two ways to run one step, taken in turns, for machines are shared and drift."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide.engine import replay_seconds


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run, in order, and how many of them went into replays."""

    seconds: tuple[float, ...]
    replays: tuple[float, ...] = ()

    @property
    def median_s(self) -> float:
        """The middle of the runs."""
        return statistics.median(self.seconds)

    @property
    def spread_s(self) -> float:
        """Distance between the first and the third quartile; 0 for fewer than three runs."""
        if len(self.seconds) < 3:
            return 0.0
        first, _, third = statistics.quantiles(self.seconds, n=4)
        return third - first

    @property
    def replay_s(self) -> float:
        """Of the median, what went into replays, by the median of their shares: a run that was held up in one says little."""
        shares = [replay / whole if whole else 0.0 for replay, whole in zip(self.replays, self.seconds, strict=False)]
        return self.median_s * statistics.median(shares) if shares else 0.0


def time_in_turns(
    steps: list[Callable[[], object]],
    rounds: int,
    device: torch.device,
    replayed: Callable[[], float] = replay_seconds,
    clock: Callable[[], float] | None = None,
) -> list[Times]:
    """Run every step once a round, in turns, after one round that does not count.

    Args:
        steps: the ways to run the step.
        rounds: how many runs of each count.
        device: synchronised before and after each run when it is an accelerator.
        replayed: seconds of replay so far, of the regions that count; by default of all.
        clock: seconds so far; by default those that pass.

    Returns:
        The times of each, in the order given.
    """
    runs: list[list[tuple[float, float]]] = [[] for _ in steps]
    for round_ in range(rounds + 1):
        for step, seen in zip(steps, runs, strict=True):
            before = replayed()
            spent = _time_once(step, device, clock or time.perf_counter)
            if round_ > 0:
                seen.append((spent, replayed() - before))
    return [Times(*zip(*seen, strict=True)) for seen in runs]


def ratio(numerator: Times, denominator: Times) -> float:
    """Median of the ratios pair by pair: drift of the machine hits both sides of a pair."""
    return statistics.median(a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True))


def _time_once(step: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    gc.collect()
    _synchronize(device)
    start = clock()
    step()
    _synchronize(device)
    return clock() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
