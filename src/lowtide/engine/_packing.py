"""The pack hooks: what autograd is given to hold in place of a tensor that it saves, and how a replay fills what it was given.

They run for every saved tensor of every step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide.engine._acceleration import native
from lowtide.engine._slot import Slot, gone
from lowtide.engine._thread import StopReplay

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._region import Region

Slots = list["weakref.ref[Slot] | None"]


def packing(
    slots: Slots,
    plain: list[int],
    grads: list[bool],
    first: int,
    frame: Frame,
    region: Region,
    keep_free: Callable[[torch.Tensor, Region], Any],
) -> Callable[[torch.Tensor], Any]:
    """The pack hook of a forward.

    Args:
        slots: of the frame: each tensor adds its own, weakly, or ``None`` if it is kept as it is.
        plain, grads: of the script that the call is expected to follow, see ``Script``. A tensor that requires gradients where
            the script says otherwise, or the reverse, makes the frame strange.
        first: the number of slots as the call began.
        frame, region: of the call.
        keep_free: says what to hold of a tensor that was there before the call; ``None`` if it was not.
    """
    count, add, ref = len(plain), slots.append, weakref.ref

    def pack(tensor: torch.Tensor) -> Any:
        index = len(slots)
        place = index - first
        kind = 0
        if place < count:
            kind = plain[place]
            if tensor.requires_grad is not grads[place]:
                frame._strange = True
        if kind == 0:
            base = tensor._base
            root = tensor if base is None else base
            if root.is_leaf and root.requires_grad:
                add(None)
                return tensor, tensor._version, region
            free = keep_free(tensor, region)
            if free is not None:
                add(None)
                return free
        slot = Slot()
        slot.frame = frame
        slot.index = index
        slot.value = None
        slot.given = False
        slot.dtype = tensor.dtype
        try:
            slot.shape = tensor.shape
        except RuntimeError:
            slot.shape = None
        if kind == 2:
            slot.ref = gone
        else:
            slot.version = tensor._version
            slot.ref = ref(tensor)
        add(ref(slot))
        return slot

    return pack


class Filling:
    """The pack hook of a replay that goes the short way: fills slots up to the last that is wanted.

    Args:
        slots: of the frame.
        last: the last that is wanted.
        stop: where the replay may end.

    Attributes:
        reached: the last place that was reached; far below any if it was not what the forward had there.

    Raises:
        StopReplay: when called, once ``stop`` or the last slot is reached, or a tensor has not the slot's shape or dtype.
    """

    __slots__ = ("_last", "_slots", "_stop", "reached")

    def __init__(self, slots: Slots, last: int, stop: int) -> None:
        self.reached = -1
        self._slots, self._last, self._stop = slots, last, stop

    def __call__(self, tensor: torch.Tensor) -> None:
        self.reached = index = self.reached + 1
        if 0 <= index <= self._last:
            ref = self._slots[index]
            slot = None if ref is None else ref()
            if slot is not None and slot.value is None:
                if tensor.dtype is not slot.dtype or (tensor.shape != slot.shape and slot.shape is not None):
                    self.reached = -sys.maxsize
                    raise StopReplay
                slot.value = tensor  # not detached, see Recorder
                slot.version = tensor._version
        if index >= self._stop or index >= len(self._slots):
            raise StopReplay


def last_wanted(slots: Slots, wanted: int, end: int) -> int:
    """The last place before ``end`` whose tensor autograd still holds, and is not there; ``wanted`` if there is none after it."""
    for place in range(end - 1, wanted, -1):
        ref = slots[place]
        slot = None if ref is None else ref()
        if slot is not None and slot.value is None:
            return place
    return wanted


def drop_values(slots: Slots, given_only: bool) -> None:
    """Let go of what replays made, or of what backward has had of it."""
    for ref in slots:
        slot = None if ref is None else ref()
        if slot is not None and slot.value is not None and (slot.given or not given_only):
            slot.value = None
            slot.given = False


def forget(_: torch.Tensor) -> None:
    """Saves nothing: the pack hook of regions in a replay, through which nobody goes backward."""


if native is not None:
    packing, Filling = native.Packing, native.Filling  # type: ignore[misc]
    last_wanted, drop_values, forget = native.last_wanted, native.drop_values, native.forget
