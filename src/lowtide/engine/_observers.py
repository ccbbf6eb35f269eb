"""Who looks on while regions run, and the switch that has them run as if they were none.

For verify, audit and doctor: they ask of any step which regions it runs, whether it calls ``checkpoint`` itself or has regions installed
on its modules. Both hold for the whole process, for a step may use several threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._profile import Profile
    from lowtide.engine._region import Region


class Observer:
    """Is told of every call of a region and of every replay; what does nothing here is to be overridden."""

    def entering(self, region: Region, profile: Profile) -> None:
        """A region is about to be called. ``watch_again(profile)`` has this call watched op by op."""

    def entered(self, frame: Frame, call: Call) -> None:
        """What its replay will need has been taken; the call begins."""

    def left(self, frame: Frame, call: Call) -> None:
        """The call returned."""

    def replayed(self, frame: Frame, seconds: float) -> None:
        """It was replayed, in so many seconds."""

    def differs(self, frame: Frame, index: int) -> None:
        """The replay of a watched call made other values than the forward had; first of the saved tensor at this place."""


class _Switch:
    """Whether regions are in force."""

    off = False


OBSERVERS: list[Observer] = []
switch = _Switch()


def tell_entering(region: Region, profile: Profile) -> None:
    """To whoever looks on."""
    for observer in OBSERVERS:
        observer.entering(region, profile)


def tell_entered(frame: Frame, call: Call) -> None:
    """To whoever looks on."""
    for observer in OBSERVERS:
        observer.entered(frame, call)


def tell_left(frame: Frame, call: Call) -> None:
    """To whoever looks on."""
    for observer in OBSERVERS:
        observer.left(frame, call)


def tell_replayed(frame: Frame, seconds: float) -> None:
    """To whoever looks on."""
    for observer in OBSERVERS:
        observer.replayed(frame, seconds)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """While in this context, ``observer`` is told of regions that run."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.remove(observer)


@contextmanager
def without_regions() -> Iterator[None]:
    """While in this context, regions that are called run as if they were none."""
    before, switch.off = switch.off, True
    try:
        yield
    finally:
        switch.off = before


def watch_again(profile: Profile) -> None:
    """Have the next call watched op by op although earlier ones were, and warnings that were given be given again."""
    profile.left = 0
    profile.told.clear()
