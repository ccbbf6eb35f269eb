"""The engine: regions whose forward is replayed in backward, with what makes the replay equal the original."""

from __future__ import annotations

from lowtide.engine._calls_in_graph import regions_in_graphs
from lowtide.engine._checkpoint import checkpoint
from lowtide.engine._explain import Guard, explain, kept_sites
from lowtide.engine._function_members import FunctionMember
from lowtide.engine._install import RegionHandle, install, refuse_installed
from lowtide.engine._kept._sites import name
from lowtide.engine._observers import Observer, observed, watch_again, without_regions
from lowtide.engine._once import is_replaying, once, original_only
from lowtide.engine._options import Options
from lowtide.engine._replay import replay_seconds
from lowtide.engine._state import register_state
from lowtide.engine._thread import is_replaying as in_replay
from lowtide.engine._transforms import transforms_allowed

__all__ = [
    "FunctionMember",
    "Guard",
    "Observer",
    "Options",
    "RegionHandle",
    "checkpoint",
    "explain",
    "in_replay",
    "install",
    "is_replaying",
    "kept_sites",
    "name",
    "observed",
    "once",
    "original_only",
    "refuse_installed",
    "regions_in_graphs",
    "register_state",
    "replay_seconds",
    "transforms_allowed",
    "watch_again",
    "without_regions",
]
