"""Running one op of a step: for how long, and what the kernel allocates and gives back that no Python object ever stands for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from lowtide._torch_private import FastMark
from lowtide.errors import StepError
from lowtide.trace._allocator import allocator_events, highest_level

_MARK = "lowtide::op"


class Execution(Protocol):
    """Runs the ops of a step and knows afterwards what each of them cost.

    Attributes:
        is_fake: nothing is computed.
    """

    is_fake: bool

    def __enter__(self) -> Execution:
        """Start measuring."""

    def __exit__(self, *exc: object) -> None:
        """Stop measuring."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op."""

    def seconds(self) -> Sequence[float]:
        """After the end: time of every op that was run, in order."""

    def peaks(self) -> Sequence[int]:
        """After the end: the most bytes above the level at which the op began, for every op, in order."""

    def returned(self) -> Sequence[Sequence[int]]:
        """After the end: for every op, sizes of the storages that it returned, where they are not what its tensors said."""


def real_execution(device: torch.device) -> Execution:
    """The way to run ops on this kind of device."""
    return CudaExecution(device) if device.type == "cuda" else CpuExecution()


class CpuExecution:
    """Bytes come from the CPU allocator's events."""

    is_fake = False

    def __init__(self) -> None:
        """Nothing is measured before the context is entered."""
        self._stack = ExitStack()
        self._seconds: list[float] = []

    def __enter__(self) -> CpuExecution:
        """Start observing the allocator."""
        self._events = self._stack.enter_context(allocator_events(_MARK))
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop observing."""
        self._stack.close()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op, marked for the profiler."""
        with FastMark(_MARK):
            start = time.perf_counter_ns()
            out = func(*args, **kwargs)
            self._seconds.append((time.perf_counter_ns() - start) / 1e9)
        return out

    def seconds(self) -> Sequence[float]:
        """Wall time of every op."""
        return self._seconds

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op.

        Raises:
            StepError: the profiler was disturbed.
        """
        ops = self._events.spans(_MARK)
        if len(ops) != len(self._seconds):
            raise StepError(f"{len(self._seconds)} ops ran but the profiler saw {len(ops)}: a step that is traced must not run a profiler")
        return [highest_level(self._events.within(span)) for span in ops]

    def returned(self) -> Sequence[Sequence[int]]:
        """Tensors say what there is."""
        return ()


class CudaExecution:
    """Bytes come from the statistics of the CUDA caching allocator, reset around each op."""

    is_fake = False

    def __init__(self, device: torch.device) -> None:
        """Measure on ``device``."""
        self._device = device
        self._seconds: list[float] = []
        self._peaks: list[int] = []

    def __enter__(self) -> CudaExecution:
        """Nothing to start."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Nothing to stop."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op alone on the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        start = time.perf_counter_ns()
        out = func(*args, **kwargs)
        torch.cuda.synchronize(self._device)
        self._seconds.append((time.perf_counter_ns() - start) / 1e9)
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - before)
        return out

    def seconds(self) -> Sequence[float]:
        """Time of every op, from launch to completion."""
        return self._seconds

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op."""
        return self._peaks

    def returned(self) -> Sequence[Sequence[int]]:
        """Tensors say what there is."""
        return ()
