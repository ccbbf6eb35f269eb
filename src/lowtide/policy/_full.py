"""Presets that keep nothing inside the modules that they choose."""

from __future__ import annotations

from lowtide.policy._policy import Policy
from lowtide.policy._preset import preset


def full() -> Policy:
    """Replay every block whole: its inputs are kept, all else is computed again.

    What ``gradient_checkpointing_enable`` of transformers and "full" in torchtitan mean.
    """
    return preset("full")
