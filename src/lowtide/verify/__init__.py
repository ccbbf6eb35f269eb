"""Prove that a plan changes nothing but memory and time."""

from __future__ import annotations

from lowtide.verify._observe import observe, same_bits
from lowtide.verify._verify import Reference, Verification

__all__ = ["Reference", "Verification", "observe", "same_bits"]
