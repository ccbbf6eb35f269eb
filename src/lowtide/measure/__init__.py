"""Measure real steps: their peak, as the allocator counts it, and their time."""

from __future__ import annotations

from lowtide.measure._free import free_bytes
from lowtide.measure._measurement import Measurement
from lowtide.measure._peak import peak_bytes
from lowtide.measure._timing import Times, ratio, time_in_turns

__all__ = ["Measurement", "Times", "free_bytes", "peak_bytes", "ratio", "time_in_turns"]
