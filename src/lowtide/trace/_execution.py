"""Running one op of a step: for how long, and what the kernel allocates and gives back that no Python object ever stands for."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Protocol

import torch

from lowtide.trace._allocator import run_and_peak
from lowtide.trace._kinds import ENOUGH, Kind, Kinds, typical_seconds
from lowtide.trace._ops import OpFacts

_FINE_S = 1e-6
"""Clocks that tick more slowly see nothing of most ops; those of threads do so on some systems."""


class Execution(Protocol):
    """Runs the ops of a step and knows afterwards what each of them cost.

    Attributes:
        is_fake: nothing is computed.
    """

    is_fake: bool

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], like: Hashable) -> Any:
        """Run one op. What costs the same has an equal ``like``."""

    def seconds(self) -> Sequence[float]:
        """After the end: time of every op that was run and did not raise, in order."""

    def peaks(self) -> Sequence[int]:
        """After the end: the most bytes above the level at which the op began, for every op, in order."""

    def returned(self) -> Sequence[Sequence[int]]:
        """After the end: for every op, sizes of the storages that it returned, where they are not what its tensors said."""


def real_execution(device: torch.device) -> Execution:
    """The way to run ops on this kind of device."""
    return CudaExecution(device) if device.type == "cuda" else CpuExecution()


class CpuExecution:
    """Bytes come from the CPU allocator's events.

    Attributes:
        known: the kinds of ops, by what those of a kind have in common.
        kinds: kind of each op that ran.
        peaks_seen: the most bytes above its start for each op that ran.
    """

    is_fake = False

    def __init__(self) -> None:
        """Nothing has run yet."""
        self.known = Kinds()
        self.kinds: list[Kind] = []
        self.peaks_seen: list[int] = []
        # On one thread an op takes the time of that thread: what other programs take of the machine meanwhile is none of it.
        own = torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution <= _FINE_S
        self._clock = time.thread_time_ns if own else time.perf_counter_ns

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], like: Hashable) -> Any:
        """Run one op. It is timed, and its allocations are observed, where not enough is known of its kind."""
        kind = self.known[like]
        if facts.varies or (kind.peak_bytes is None and not facts.view):
            out, kind.peak_bytes = run_and_peak(lambda: self._timed(kind, facts.call, args, kwargs))
        elif len(kind.seconds) < ENOUGH:
            out = self._timed(kind, facts.call, args, kwargs)
        else:
            out = facts.call(*args, **kwargs)
        # Only now, for an op that raises is none of the step, which may well go on.
        self.kinds.append(kind)
        self.peaks_seen.append(kind.peak_bytes or 0)
        return out

    def _timed(self, kind: Kind, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        start = self._clock()
        out = func(*args, **kwargs)
        # An op that the clock did not see took time all the same: shares of the step's time are asked for.
        kind.seconds.append(max(self._clock() - start, 1) / 1e9)
        return out

    def seconds(self) -> Sequence[float]:
        """What is typical of each op's kind: of its thread where it has one, else by the wall clock."""
        return typical_seconds(self.kinds)

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op."""
        return self.peaks_seen

    def returned(self) -> Sequence[Sequence[int]]:
        """Tensors say what there is."""
        return ()


class CudaExecution:
    """Bytes come from the statistics of the CUDA caching allocator, reset around each op."""

    is_fake = False

    def __init__(self, device: torch.device) -> None:
        """Measure on ``device``."""
        self._device = device
        self._known = Kinds()
        self._kinds: list[Kind] = []
        self._peaks: list[int] = []

    def run(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], like: Hashable) -> Any:
        """Run one op alone on the device."""
        kind = self._known[like]
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        start = time.perf_counter_ns()
        out = facts.call(*args, **kwargs)
        torch.cuda.synchronize(self._device)
        kind.seconds.append((time.perf_counter_ns() - start) / 1e9)
        self._kinds.append(kind)
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - before)
        return out

    def seconds(self) -> Sequence[float]:
        """What is typical of each op's kind, from launch to completion."""
        return typical_seconds(self._kinds)

    def peaks(self) -> Sequence[int]:
        """Bytes above the start for every op."""
        return self._peaks

    def returned(self) -> Sequence[Sequence[int]]:
        """Tensors say what there is."""
        return ()
