"""Whether this thread is in a replay, and what ends one."""

from __future__ import annotations

import threading
from typing import Any


class StopReplay(BaseException):
    """Ends a replay: it has made all that was needed, or has gone wrong. No ``Exception``: no handler takes it for an error."""


class Mismatch(BaseException):
    """A replay went another way than the forward; becomes a ``ReplayMismatchError`` with all that can be found out.

    Attributes:
        index: the first saved tensor that differs; negative where none does, but the random state.
        found: shape, dtype and strides in the replay; ``None`` if it saved no more.
        values: shape and dtype agree, the bits do not.
    """

    def __init__(self, index: int, found: tuple[Any, ...] | None, *, values: bool = False) -> None:
        super().__init__()
        self.index, self.found, self.values = index, found, values


class _Thread(threading.local):
    """What replays do in this thread.

    Attributes:
        depth: how many are under way, one inside the other.
        keeps: what the innermost saves may be asked for while it runs: it goes backward through parts of itself.
    """

    depth = 0
    keeps = False


state = _Thread()


def is_replaying() -> bool:
    """Whether this code runs again in backward, to make what backward needs, rather than in the forward itself."""
    return state.depth > 0
