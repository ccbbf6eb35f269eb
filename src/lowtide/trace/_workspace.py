"""What a kernel allocates and gives back while it runs: bytes that no Python object ever stands for."""

from __future__ import annotations

import bisect
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from lowtide.trace._allocator import allocator_events, highest_level

_MARK = "lowtide::op"


class Workspace(Protocol):
    """Measures, per op, the most bytes above the level at which the op began."""

    def __enter__(self) -> Workspace:
        """Start measuring."""

    def __exit__(self, *exc: object) -> None:
        """Stop measuring."""

    def around(self) -> Any:
        """A context to run one op in."""

    def peaks(self) -> list[int]:
        """After the end: bytes above the start for every op, in order."""


def workspace_for(device: torch.device) -> Workspace:
    """The way to measure on this kind of device."""
    return CudaWorkspace(device) if device.type == "cuda" else CpuWorkspace()


class CpuWorkspace:
    """From the CPU allocator's events."""

    def __init__(self) -> None:
        """Nothing is measured before the context is entered."""
        self._stack = ExitStack()

    def __enter__(self) -> CpuWorkspace:
        """Start observing the allocator."""
        self._events = self._stack.enter_context(allocator_events(_MARK))
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop observing."""
        self._stack.close()

    def around(self) -> Any:
        """Mark one op for the profiler."""
        return torch.autograd.profiler.record_function(_MARK)

    def peaks(self) -> list[int]:
        """Bytes above the start for every op, in order."""
        times = [time for time, _ in self._events.allocations]
        sizes = [size for _, size in self._events.allocations]
        ops = self._events.spans(_MARK)
        return [highest_level(sizes[bisect.bisect_left(times, start) : bisect.bisect_right(times, end)]) for start, end in ops]


class CudaWorkspace:
    """From the statistics of the CUDA caching allocator, reset around each op."""

    def __init__(self, device: torch.device) -> None:
        """Measure on ``device``."""
        self._device = device
        self._peaks: list[int] = []

    def __enter__(self) -> CudaWorkspace:
        """Nothing to start."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to stop."""

    def around(self) -> _CudaSpan:
        """Measure one op."""
        return _CudaSpan(self._device, self._peaks)

    def peaks(self) -> list[int]:
        """Bytes above the start for every op, in order."""
        return self._peaks


class _CudaSpan:
    def __init__(self, device: torch.device, peaks: list[int]) -> None:
        self._device, self._peaks = device, peaks

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def __exit__(self, *exc: object) -> None:
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - self._before)
