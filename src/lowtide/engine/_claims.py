"""Which calls are replayed right now, and by which thread: two backwards may ask for what one call saved at once.

A lock for each call would have to be made for each call of each step. Threads meet at one call hardly ever, so what there is for
each is an entry in one table while it is replayed, and one condition for all who wait.
"""

from __future__ import annotations

import threading

CLAIMED: dict[int, int] = {}
"""Of the frames that are replayed, by their ``id``, the thread that replays them. Whoever puts it there with ``setdefault`` has it."""
WAITING: list[int] = []
_released = threading.Condition()


def wait_for(frame: int, thread: int) -> None:
    """Wait until no other thread has a frame, and claim it."""
    with _released:
        WAITING.append(thread)
        try:
            while CLAIMED.setdefault(frame, thread) != thread:
                _released.wait()
        finally:
            WAITING.remove(thread)


def release(frame: int, thread: int) -> None:
    """Let others have a frame, if this thread had it."""
    if CLAIMED.get(frame) == thread:
        del CLAIMED[frame]
        if WAITING:  # who waits was there before it looked for the last time, so either is seen here or saw that it is free
            with _released:
                _released.notify_all()
