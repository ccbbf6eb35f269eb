"""Record a step: every op and storage, what autograd saves, and the module calls that could be replayed."""

from __future__ import annotations

from lowtide.trace._allocator import allocator_events, highest_level
from lowtide.trace._buckets import bucket_sizes
from lowtide.trace._gpus import gpu_named
from lowtide.trace._keep import saved_away
from lowtide.trace._objects import find_optimizers, live_tensors
from lowtide.trace._ops import facts_of, tensors_in
from lowtide.trace._random import random_states
from lowtide.trace._source import source_line
from lowtide.trace._sparse import parts_of_sparse
from lowtide.trace._trace import device_of, record_step, trace
from lowtide.trace._training_state import TrainingState

__all__ = [
    "TrainingState",
    "allocator_events",
    "bucket_sizes",
    "device_of",
    "facts_of",
    "find_optimizers",
    "gpu_named",
    "highest_level",
    "live_tensors",
    "parts_of_sparse",
    "random_states",
    "record_step",
    "saved_away",
    "source_line",
    "tensors_in",
    "trace",
]
