"""From a plan to regions on a model."""

from __future__ import annotations

from lowtide.policy._apply import Handle, apply
from lowtide.policy._fingerprint import fingerprint

__all__ = ["Handle", "apply", "fingerprint"]
