"""Prove that a plan changes nothing but memory and time."""

from __future__ import annotations

from lowtide.verify._observe import observe, same_bits
from lowtide.verify._verify import Verification, verify_step

__all__ = ["Verification", "observe", "same_bits", "verify_step"]
