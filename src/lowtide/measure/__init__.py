"""Measure real steps: their peak, as the allocator counts it, and their time."""

from __future__ import annotations

from lowtide.measure._free import free_bytes
from lowtide.measure._measure import measure
from lowtide.measure._measurement import Comparison, Measurement
from lowtide.measure._out_of_memory import MemoryWatch, memory_watch
from lowtide.measure._peak import peak_bytes
from lowtide.measure._phase_peaks import live_storages
from lowtide.measure._phases import BACKWARD, OPTIMIZER, phases_told
from lowtide.measure._timing import Times, ratio, time_in_turns

__all__ = [
    "BACKWARD",
    "OPTIMIZER",
    "Comparison",
    "Measurement",
    "MemoryWatch",
    "Times",
    "free_bytes",
    "live_storages",
    "measure",
    "memory_watch",
    "peak_bytes",
    "phases_told",
    "ratio",
    "time_in_turns",
]
