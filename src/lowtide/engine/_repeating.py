"""Whether a replay that made other values than its forward would make them again.

If it would, something that the region reads is not what it was: the gradient would be wrong, every time. If it would not, a kernel is not
deterministic: its forward might as well have come out like that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from lowtide.engine._replay import Recorder, run_calls
from lowtide.engine._thread import Mismatch, StopReplay
from lowtide.engine._values import hash_of, same_hash

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


def repeats_itself(frame: Frame, index: int) -> bool:
    """Replay a region twice more, up to a saved tensor: whether that has the same values both times."""
    found = [_Hashing(frame, index).run() for _ in range(2)]
    return None not in found and same_hash(*found)


class _Hashing(Recorder):
    """Hooks of a run that is only to tell what one saved tensor is."""

    runs_all = True

    def __init__(self, frame: Frame, index: int) -> None:
        super().__init__(frame, [None])
        self._wanted, self._seen, self._hash = index, -1, None  # type: int, int, Any

    def run(self) -> Any:
        """The hash of the tensor; ``None`` if there is none."""
        with suppress(Exception, Mismatch, StopReplay):
            run_calls(self._frame, self)
        return self._hash

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """Looks at the one tensor."""
        return self._note

    def _note(self, tensor: torch.Tensor) -> Any:
        self._seen += 1
        if self._seen == self._wanted:
            self._hash = hash_of(tensor)
        return tensor.detach()
