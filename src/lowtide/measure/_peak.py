"""The most bytes alive during a step, as the allocator counts them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.profiler import record_function

from lowtide.trace import allocator_events, highest_level

_MARK = "lowtide::measured"


def peak_bytes(step: Callable[[], object], device: torch.device, resident_bytes: int, steps: int = 1) -> int:
    """Run a step twice and return the peak of the second run.

    The first run is there so that whatever the second one frees (the gradients of the step before, say) was
    allocated under the eyes of the observer.

    What a thread of a library's is the last to hold, such as a buffer of a collective, is released unseen on the CPU, and would count for
    ever. A step that was seen whole ends at the level at which it began, so of several the one that comes closest to that counts.

    Args:
        step: the step.
        device: on CUDA the caching allocator's statistics are read, on the CPU the allocator's events.
        resident_bytes: what is alive before the step; the CPU allocator cannot tell. Not used on CUDA, where the
            allocator counts everything.
        steps: how many runs to choose from on the CPU.

    Returns:
        Bytes.
    """
    return _cuda_peak(step, device) if device.type == "cuda" else resident_bytes + _cpu_rise(step, steps)


def _cuda_peak(step: Callable[[], object], device: torch.device) -> int:
    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _cpu_rise(step: Callable[[], object], steps: int) -> int:
    with allocator_events(_MARK) as events:
        step()
        for _ in range(steps):
            with record_function(_MARK):
                step()
    seen = map(events.within, events.spans(_MARK))
    return min((abs(sum(sizes)), highest_level(sizes)) for sizes in seen)[1]
