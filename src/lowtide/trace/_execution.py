"""Running one op of a step: for how long, and what the kernel allocates and gives back that no Python object ever stands for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from lowtide._torch_private import FastMark, tell_of_ops
from lowtide.errors import StepError
from lowtide.trace._allocator import allocator_events, highest_level
from lowtide.trace._ops import OpFacts

_MARK = "lowtide::op"
_FINE_S = 1e-6
"""Clocks that tick more slowly see nothing of most ops; those of threads do so on some systems."""


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

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], *, timed: bool) -> Any:
        """Run one op; its time is wanted if ``timed``."""

    def seconds(self) -> Sequence[float | None]:
        """After the end: time of every op that was run, in order; ``None`` where it was not taken."""

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
        self._seconds: list[float | None] = []
        self._marked: list[int] = []
        # On one thread an op takes the time of that thread: what other programs take of the machine meanwhile is none of it.
        own = torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution <= _FINE_S
        self._clock = time.thread_time_ns if own else time.perf_counter_ns

    def __enter__(self) -> CpuExecution:
        """Start observing the allocator."""
        self._events = self._stack.enter_context(allocator_events(_MARK))
        # The marks say all that is wanted: to be told of what each op is made of would take longer than most ops.
        tell_of_ops(False)
        self._stack.callback(tell_of_ops, True)
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop observing."""
        self._stack.close()

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], *, timed: bool) -> Any:
        """Run one op, marked for the profiler where it may allocate."""
        if facts.view:
            return self._timed(facts.func, args, kwargs, timed)
        self._marked.append(len(self._seconds))
        tell_of_ops(True)
        with FastMark(_MARK):
            tell_of_ops(False)
            return self._timed(facts.func, args, kwargs, timed)

    def _timed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timed: bool) -> Any:
        start = self._clock() if timed else 0
        out = func(*args, **kwargs)
        # An op that the clock did not see took time all the same: shares of the step's time are asked for.
        self._seconds.append(max(self._clock() - start, 1) / 1e9 if timed else None)
        return out

    def seconds(self) -> Sequence[float | None]:
        """Time of the ops whose time was wanted: of their thread where it has one, else by the wall clock."""
        return self._seconds

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op.

        Raises:
            StepError: the profiler was disturbed.
        """
        ops = self._events.spans(_MARK)
        if len(ops) != len(self._marked):
            raise StepError(f"{len(self._marked)} ops ran but the profiler saw {len(ops)}: a step that is traced must not run a profiler")
        # One that raised has a mark, and its number is that of the op after it.
        marks = dict(zip(self._marked, ops, strict=True))
        return [highest_level(self._events.within(marks[op])) if op in marks else 0 for op in range(len(self._seconds))]

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

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], *, timed: bool) -> Any:
        """Run one op alone on the device."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        start = time.perf_counter_ns()
        out = facts.func(*args, **kwargs)
        torch.cuda.synchronize(self._device)
        self._seconds.append((time.perf_counter_ns() - start) / 1e9)
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - before)
        return out

    def seconds(self) -> Sequence[float | None]:
        """Time of every op, from launch to completion."""
        return self._seconds

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op."""
        return self._peaks

    def returned(self) -> Sequence[Sequence[int]]:
        """Tensors say what there is."""
        return ()
