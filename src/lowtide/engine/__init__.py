"""The engine: regions whose forward is replayed in backward, with what makes the replay equal the original."""

from __future__ import annotations

from lowtide.engine._checkpoint import checkpoint
from lowtide.engine._explain import Guard, explain
from lowtide.engine._install import RegionHandle, install, refuse_installed
from lowtide.engine._once import once, original_only
from lowtide.engine._options import Options
from lowtide.engine._replay import replay_seconds
from lowtide.engine._state import register_state
from lowtide.engine._thread import is_replaying

__all__ = [
    "Guard",
    "Options",
    "RegionHandle",
    "checkpoint",
    "explain",
    "install",
    "is_replaying",
    "once",
    "original_only",
    "refuse_installed",
    "register_state",
    "replay_seconds",
]
