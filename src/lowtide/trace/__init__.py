"""Record a step: every op and storage, what autograd saves, and the module calls that could be replayed."""

from __future__ import annotations

from lowtide.trace._allocator import allocator_events, highest_level
from lowtide.trace._keep import saved_away
from lowtide.trace._objects import find_optimizers
from lowtide.trace._trace import device_of, record_step, trace
from lowtide.trace._training_state import TrainingState, random_states

__all__ = [
    "TrainingState",
    "allocator_events",
    "device_of",
    "find_optimizers",
    "highest_level",
    "random_states",
    "record_step",
    "saved_away",
    "trace",
]
