"""The peak of a step, phase by phase: on CUDA from the allocator's counters, on the CPU from its events."""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.autograd.profiler import record_function

from lowtide._torch_private import storage_key
from lowtide.measure._phases import BACKWARD, FORWARD, OPTIMIZER, REPLAY, phases_told
from lowtide.trace import allocator_events, bucket_sizes, live_tensors, parts_of_sparse

_MARK = "lowtide::measured"
_LABELS = {f"lowtide::{phase}": phase for phase in (BACKWARD, OPTIMIZER, REPLAY)}


@dataclass(frozen=True, slots=True)
class PhasePeaks:
    """Bytes of one step.

    Attributes:
        peak_bytes: the most alive at once.
        live_bytes: alive before the step.
        reserved_bytes: on CUDA, the most that the allocator had reserved.
        by_phase: the most alive at once in each phase that the step has, in the order they begin.
    """

    peak_bytes: int
    live_bytes: int
    reserved_bytes: int | None
    by_phase: tuple[tuple[str, int], ...]


def phase_peaks(step: Callable[[], object], model: nn.Module, device: torch.device, ours: Set[int] = frozenset()) -> PhasePeaks:
    """Run a step twice and measure the second run.

    Args:
        step: the step.
        model: that it trains.
        device: whose bytes count.
        ours: keys of storages that are not the step's and not to be counted on the CPU: a snapshot of the model, say.
    """
    return _on_cuda(step, device) if device.type == "cuda" else _on_cpu(step, model, device, ours)


def live_storages(model: nn.Module | None, device: torch.device) -> dict[int, int]:
    """Key and bytes of every storage on a device that a Python object stands for; of a model also gradients that only autograd touched."""
    for parameter in () if model is None else model.parameters():
        parameter.grad  # noqa: B018  # a gradient that only autograd ever touched has no Python object before it is read
    found: dict[int, int] = {}
    tensors = live_tensors()
    for tensor in chain(tensors, *map(parts_of_sparse, tensors)):
        if hasattr(type(tensor), "__tensor_flatten__"):
            continue  # made of other tensors, such as one spread over processes: it says how large the whole is, and has no memory
        if tensor.device == device and (key := storage_key(tensor)):
            storage = tensor.untyped_storage()
            if storage.device == device:  # a fake tensor says that it is there, and its storage that it is nowhere
                found[key] = storage.nbytes()
    return found


def _on_cpu(step: Callable[[], object], model: nn.Module, device: torch.device, ours: Set[int]) -> PhasePeaks:
    with allocator_events(_MARK, *_LABELS) as events:
        step()
        gc.collect()
        live = sum(size for key, size in live_storages(model, device).items() if key not in ours) + sum(bucket_sizes(model))
        with phases_told(lambda phase: record_function(f"lowtide::{phase}")), record_function(_MARK):
            step()
    [(start, end)] = events.spans(_MARK)
    spans = sorted((a, b, phase) for label, phase in _LABELS.items() for a, b in events.spans(label) if start <= a <= end)
    sizes = [(time, size) for time, size in events.allocations if start <= time <= end]
    peaks = _highest(sizes, spans, start)
    by_phase = tuple((phase, live + level) for phase, level in peaks.items())
    return PhasePeaks(max(size for _, size in by_phase), live, None, by_phase)


def _highest(sizes: list[tuple[int, int]], spans: list[tuple[int, int, str]], start: int) -> dict[str, int]:
    """The highest level in each phase, counted from the start."""
    peaks, level = {FORWARD: 0}, 0
    turns = sorted({time for a, b, _ in spans for time in (a, b)})
    changes = sorted([*((time, size) for time, size in sizes), *((time, 0) for time in turns)])
    innermost = _innermost(spans)
    for time, size in changes:
        level += size
        phase = innermost(time) if time >= start else FORWARD
        peaks[phase] = max(peaks.get(phase, level), level)
    return peaks


def _innermost(spans: list[tuple[int, int, str]]) -> Callable[[int], str]:
    """The phase at a time. Spans lie inside each other or apart, so the last to begin that has not ended is the innermost."""
    edges = sorted([(a, 0, phase) for a, _, phase in spans] + [(b, 1, phase) for _, b, phase in spans], key=lambda e: (e[0], e[1]))
    times, phases, stack = [], [], [FORWARD]
    for time, ends, phase in edges:
        if ends:
            stack.remove(phase)
        else:
            stack.append(phase)
        times.append(time)
        phases.append(stack[-1])

    def at(time: int) -> str:
        place = bisect_right(times, time)
        return phases[place - 1] if place else FORWARD

    return at


class _CudaPeaks:
    """Reads the allocator's peak whenever a phase begins or ends, and starts it anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stack = [FORWARD]
        self.peaks: dict[str, int] = {FORWARD: 0}

    def turn(self) -> None:
        phase = self._stack[-1]
        self.peaks[phase] = max(self.peaks.get(phase, 0), torch.cuda.max_memory_allocated(self._device))
        torch.cuda.reset_peak_memory_stats(self._device)

    @contextmanager
    def entered(self, phase: str) -> Iterator[None]:
        self.turn()
        self._stack.append(phase)
        try:
            yield
        finally:
            self.turn()
            self._stack.pop()


def _on_cuda(step: Callable[[], object], device: torch.device) -> PhasePeaks:
    step()
    torch.cuda.synchronize(device)
    live = torch.cuda.memory_allocated(device)
    reserved = _reserved_on_cuda(step, device)
    torch.cuda.reset_peak_memory_stats(device)
    peaks = _CudaPeaks(device)
    with phases_told(peaks.entered):
        step()
    torch.cuda.synchronize(device)
    peaks.turn()
    return PhasePeaks(max(peaks.peaks.values()), live, reserved, tuple(peaks.peaks.items()))


def _reserved_on_cuda(step: Callable[[], object], device: torch.device) -> int:
    """In a run of its own, from an empty cache: what the allocator kept from earlier steps is not this step's."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_reserved(device)
