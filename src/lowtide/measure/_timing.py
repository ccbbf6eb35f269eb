"""Times of two ways to run one step, taken in turns, for machines are shared and drift."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of each run, in order."""

    seconds: tuple[float, ...]

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


def time_in_turns(steps: list[Callable[[], object]], rounds: int, device: torch.device) -> list[Times]:
    """Run every step once a round, in turns, after one round that does not count.

    Args:
        steps: the ways to run the step.
        rounds: how many runs of each count.
        device: synchronised before and after each run when it is an accelerator.

    Returns:
        The times of each, in the order given.
    """
    runs: list[list[float]] = [[] for _ in steps]
    for round_ in range(rounds + 1):
        for step, seconds in zip(steps, runs, strict=True):
            spent = _time_once(step, device)
            if round_ > 0:
                seconds.append(spent)
    return [Times(tuple(seconds)) for seconds in runs]


def ratio(numerator: Times, denominator: Times) -> float:
    """Median of the ratios pair by pair: drift of the machine hits both sides of a pair."""
    return statistics.median(a / b for a, b in zip(numerator.seconds, denominator.seconds, strict=True))


def _time_once(step: Callable[[], object], device: torch.device) -> float:
    gc.collect()
    _synchronize(device)
    start = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
