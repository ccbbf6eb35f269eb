"""``measure``: what a step takes, or what it takes against another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import overload

import torch
from torch import nn

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
        times = time_in_turns(ways, steps, device)
        found = [_measured(way, model, (device, ours), taken, tokens) for way, taken in zip(ways, times, strict=True)]
    finally:
        state.restore()
    return found[0] if against is None else Comparison(found[0], found[1], ratio(*times))


def _measured(way: Step, model: nn.Module, where: tuple[torch.device, set[int]], times: Times, tokens: int | None) -> Measurement:
    device, ours = where
    peaks = phase_peaks(way, model, device, ours)
    found = Measurement.of(peaks.peak_bytes, times)
    return replace(
        found,
        reserved_bytes=peaks.reserved_bytes,
        phase_peaks=peaks.by_phase,
        live_bytes=peaks.live_bytes,
        tokens_per_s=None if tokens is None else tokens / found.step_s,
        resident_set_bytes=None if device.type == "cuda" else peak_resident_set_bytes(way),
    )
