"""Whether modules hold what they held, and whether anything was written to it: asked before and after each replay, so in few steps."""

from __future__ import annotations

from lowtide.engine._acceleration import native
from lowtide.engine._guards._modules import Taken, Watch
from lowtide.engine._guards._reading import are_versions

Watches = list[tuple[Watch, Taken]]


def still_as(then: Taken) -> bool:
    """Whether no tensor was modified since; quick."""
    try:
        return are_versions(then[0], then[1]) and all(tensor._version == version for tensor, version, _ in then[5])
    except RuntimeError:
        return False


def are_in_place(watches: Watches, attributes: bool) -> bool:
    """Whether modules have in them what they had; no buffer was written to, which a replay must not do again if the forward did it."""
    for watch, taken in watches:
        if not watch.is_as(taken, attributes=attributes) or (watch.has_still_buffers and not still_as(taken)):
            return False
    return True


def are_unmodified(watches: Watches) -> bool:
    """Whether no tensor in modules was modified since."""
    for _, taken in watches:  # noqa: SIM110 – a generator takes longer
        if not still_as(taken):
            return False
    return True


if native is not None:
    are_unmodified = native.are_unmodified
