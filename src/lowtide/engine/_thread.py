"""Whether this thread is in a replay, and what ends one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lowtide import _torch_private as private

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._sites import Sites


class StopReplay(BaseException):
    """Ends a replay: it has made all that was needed, or has gone wrong. No ``Exception``: no handler takes it for an error."""


class Mismatch(BaseException):
    """A replay went another way than the forward; becomes a ``ReplayMismatchError`` with all that can be found out.

    Attributes:
        index: the first saved tensor that differs; negative where none does, but the random state.
        found: shape, dtype and strides in the replay; ``None`` if it saved no more.
        values: shape and dtype agree, the bits do not.
        wrote: it was about to write to an input, as the forward had not.
    """

    def __init__(self, index: int, found: tuple[Any, ...] | None, *, values: bool = False, wrote: bool = False) -> None:
        super().__init__()
        self.index, self.found, self.values, self.wrote = index, found, values, wrote


class _Thread(threading.local):
    """What replays do in this thread.

    Attributes:
        depth: how many are under way, one inside the other.
        keeps: what the innermost saves may be asked for while it runs: it goes backward through parts of itself.
        finder: finds the kept calls of the region that runs, where there are any.
        saved: the memory of what backward is given is noted here, where that is to be known.
        level: in a replay, the level of forward-mode derivatives that backward is in: it is none of the forward's.
        since: the time at which the outermost region that runs was entered, on the clock of what is learned; -1 outside of one.
        joined: in a replay, frames of regions inside it that wait for their next member, by what the members share. Nobody goes
            backward through those, so that nothing else holds them.
        asked: code asked whether it is replayed.
        recorders: of the calls of regions that run watched, for a policy to be asked about them; innermost last.
    """

    def __init__(self) -> None:
        # All in the object's own dictionary: whoever needs several of them takes ``vars(state)``, which is looked up once.
        self.depth = 0
        self.keeps = False
        self.finder: Any = None
        self.saved: set[int] | None = None
        self.since = -1
        self.level = -1
        self.asked = False
        self.joined: dict[int, Frame] = {}
        self.recorders: list[Sites] = []


state = _Thread()


@contextmanager
def in_replay(*, keeps: bool) -> Iterator[None]:
    """What runs in here is a replay; ``keeps`` as in ``state``."""
    around, level, state.keeps, state.level = state.keeps, state.level, keeps, private.dual_level()
    state.depth += 1
    try:
        yield
    finally:
        state.depth -= 1
        state.keeps, state.level = around, level


def is_replaying() -> bool:
    """Whether a replay is under way; for lowtide itself. Regions whose own code asks may do other things then, and are told apart."""
    return state.depth > 0


def hooks_work() -> bool:
    """Whether what autograd saves here can be dropped and made again: function transforms forbid it, and tangents would be gone by then."""
    return private.hooks_allowed() and not private.functorch_active() and private.dual_level() <= state.level
