"""``measure``: what a step takes, or what it takes against another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import overload

import torch
from torch import nn

from lowtide.engine import replay_seconds
from lowtide.errors import InvalidInputError
from lowtide.measure._measurement import Comparison, Measurement
from lowtide.measure._phase_peaks import live_storages, phase_peaks
from lowtide.measure._resident import peak_resident_set_bytes
from lowtide.measure._timing import Times, ratio, time_in_turns
from lowtide.trace import TrainingState, device_of

Step = Callable[[], object]


@overload
def measure(model: nn.Module, step: Step, *, tokens: int | None = None, steps: int = 5, against: None = None) -> Measurement: ...


@overload
def measure(model: nn.Module, step: Step, *, tokens: int | None = None, steps: int = 5, against: Step) -> Comparison: ...


def measure(
    model: nn.Module, step: Step, *, tokens: int | None = None, steps: int = 5, against: Step | None = None
) -> Measurement | Comparison:
    """Measure real steps: peak, peak by phase, time, tokens per second, share of time in replays.

    The step runs ``steps`` times to be timed, and five more: to warm up, once before each thing that is measured, and
    under the eyes of the allocator. Parameters, buffers, gradients, optimizer state and random state are put back afterwards.

    Args:
        model: the model that the step trains.
        step: runs forward and backward, and the optimizer if it likes; takes no arguments.
        tokens: that one step trains on.
        steps: how many are timed.
        against: another way to run the step. The two are timed in turns, so that a machine that drifts hits both.

    Returns:
        What the step takes; with ``against``, both and their ratio.

    Raises:
        InvalidInputError: ``steps`` or ``tokens`` is not above zero.
        Exception: whatever a step raises.
    """
    for name, count in (("steps", steps), ("tokens", 1 if tokens is None else tokens)):
        if count <= 0:
            raise InvalidInputError(f"{name} is a number above zero; found {count}")
    ways = [step] if against is None else [step, against]
    device = device_of(model)
    before = live_storages(model, device).keys()
    state = TrainingState(model)
    ours = live_storages(model, device).keys() - before
    try:
        for way in ways:
            way()
        times, replays = _timed(ways, steps, device)
        found = [_measured(way, model, (device, ours), t, s, tokens) for way, t, s in zip(ways, times, replays, strict=True)]
    finally:
        state.restore()
    return found[0] if against is None else Comparison(found[0], found[1], ratio(*times))


def _timed(ways: list[Step], steps: int, device: torch.device) -> tuple[list[Times], list[float]]:
    """Times of each way, and seconds of replay in a step of each."""
    spent = [0.0] * len(ways)

    def counted(i: int) -> Step:
        def run() -> None:
            before = replay_seconds()
            ways[i]()
            spent[i] += replay_seconds() - before

        return run

    times = time_in_turns([counted(i) for i in range(len(ways))], steps, device)
    return times, [seconds / (steps + 1) for seconds in spent]


def _measured(
    way: Step, model: nn.Module, where: tuple[torch.device, set[int]], times: Times, replay_s: float, tokens: int | None
) -> Measurement:
    device, ours = where
    peaks = phase_peaks(way, model, device, ours)
    found = Measurement.of(peaks.peak_bytes, times, replay_s)
    return replace(
        found,
        reserved_bytes=peaks.reserved_bytes,
        phase_peaks=peaks.by_phase,
        live_bytes=peaks.live_bytes,
        tokens_per_s=None if tokens is None else tokens / found.step_s,
        resident_set_bytes=None if device.type == "cuda" else peak_resident_set_bytes(way),
    )
