"""What went wrong when a replay did not do what the forward did. Found out when it happens: the region is run once more, watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.engine._replay import Mismatch, where_saved
from lowtide.errors import ReplayMismatchError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


def explain_mismatch(frame: Frame, mismatch: Mismatch) -> ReplayMismatchError:
    """The error to raise."""
    return ReplayMismatchError(f"{mismatch.index} {mismatch.found} {where_saved(frame, min(mismatch.index, len(frame.metas)-1))}")


_ = Any
