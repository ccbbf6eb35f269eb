"""The CPU allocator's events, which torch's profilers record: of a block of code with time stamps, or of a single op, at little cost."""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch

from lowtide._torch_private import CPU_EVENT, start_memory_profile, stop_memory_profile
from lowtide.errors import StepError


class AllocatorEvents:
    """What the CPU allocator did while a block of code ran; filled when the block ends."""

    def __init__(self) -> None:
        """Nothing has been observed yet."""
        self.allocations: list[tuple[int, int]] = []
        """(time in ns, bytes; negative when freed), in order of time."""
        self._times: list[int] = []
        self._spans: dict[str, list[tuple[int, int]]] = {}

    def spans(self, mark: str) -> list[tuple[int, int]]:
        """(start, end) in ns of every ``record_function(mark)`` block, in order of time."""
        return sorted(self._spans.get(mark, []))

    def within(self, span: tuple[int, int]) -> list[int]:
        """Bytes of the allocations in a span of time, in order."""
        if len(self._times) != len(self.allocations):
            self._times = [time for time, _ in self.allocations]
        first, last = bisect.bisect_left(self._times, span[0]), bisect.bisect_right(self._times, span[1])
        return [size for _, size in self.allocations[first:last]]

    def _read(self, profile: torch.autograd.profiler.profile, marks: Iterable[str]) -> None:
        results = profile.kineto_results
        events = [] if results is None else results.events()
        self._spans = {mark: [] for mark in marks}
        for event in events:
            name = event.name()
            if name == "[memory]":
                if event.device_type() == CPU_EVENT:
                    self.allocations.append((event.start_ns(), event.nbytes()))  # type: ignore[attr-defined]
            elif name in self._spans:
                self._spans[name].append((event.start_ns(), event.end_ns()))
        self.allocations.sort(key=itemgetter(0))


@contextmanager
def allocator_events(*marks: str) -> Iterator[AllocatorEvents]:
    """Observe the CPU allocator for the length of a block.

    Args:
        marks: names of ``record_function`` blocks whose spans are wanted.

    Raises:
        RuntimeError: another profiler is running in this process.
    """
    found = AllocatorEvents()
    with _quiet_profiler(), torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        yield found
    found._read(profile, marks)


@contextmanager
def _quiet_profiler() -> Iterator[None]:
    # The profiler's library reads its log level from the environment at its first start, and else tells of it on stderr.
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


def run_and_peak(run: Callable[[], Any]) -> tuple[Any, int]:
    """Call ``run`` under the eyes of the CPU allocator's observer; a few microseconds more than to call it.

    Returns:
        Its result, and the most bytes above the level at which it began. What was allocated before counts for nothing when it is freed.

    Raises:
        StepError: another profiler is running in this thread.
        Exception: whatever ``run`` raises.
    """
    try:
        start_memory_profile()
    except RuntimeError as error:
        raise StepError("a step that is traced must not run a profiler, for what it allocates is seen through torch's own") from error
    try:
        result = run()
    finally:
        sizes = stop_memory_profile()
    return result, highest_level(sizes)


def highest_level(sizes: Iterable[int]) -> int:
    """The highest sum that a prefix of ``sizes`` reaches, at least 0."""
    level = highest = 0
    for size in sizes:
        level += size
        highest = max(highest, level)
    return highest
