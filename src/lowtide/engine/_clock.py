"""When something was learned that has a region hand other tensors to the hooks around it. A replay goes by what its forward knew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.engine._thread import state

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


class _Clock:
    """Counts what was learned by regions of this process.

    A region inside another hands its kept results, and what it finds in objects, to the outer one, which counts what it is handed. In a
    replay of the outer one it has to do as it did in the forward, so what was learned after that began has to be left aside.
    """

    now = 0


clock = _Clock()


def enter_at(frame: Frame) -> int:
    """The time at which the outermost region around was entered; the frame notes it when its first member is."""
    if len(frame.calls) < 2:
        frame.since = clock.now if state.since < 0 else state.since
    return frame.since
