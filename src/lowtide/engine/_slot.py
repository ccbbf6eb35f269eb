"""What autograd holds in place of a tensor that it saved inside a region.

A slot is a weak reference to the saved tensor with a few fields: while something else keeps the tensor alive (a kept
output, the input of the next region) backward gets that very tensor and nothing is replayed. A replay puts the tensor it
made into the slot, so that it lives exactly as long as autograd holds the slot: the region reaches its slots only weakly.

    autograd node ──▶ Slot ──▶ Frame ──▶ inputs of the call
                       ▲          │
                       └──weakly──┘

A leaf that requires gradients is a parameter, not an activation: it is held as it is, with the version that it had.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch_private import alive
from lowtide.errors import InputChangedError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame

Free = tuple[torch.Tensor, int, "Frame | None"]


class Slot(weakref.ref):  # type: ignore[type-arg]
    """One dropped tensor.

    Attributes:
        frame: the call it was saved in.
        index: its place among all tensors saved in the call.
        version: of the tensor when it was saved.
        value: what a replay made of it.
        given: whether backward has had ``value``.
    """

    __slots__ = ("__weakref__", "frame", "given", "index", "value", "version")
    frame: Frame
    given: bool
    index: int
    value: torch.Tensor | None
    version: int

    def original(self) -> torch.Tensor | None:
        """The saved tensor itself, if it is still alive and unchanged."""
        tensor = alive(self)
        return tensor if tensor is not None and tensor._version == self.version else None


def unpack(packed: Any) -> torch.Tensor:
    """The unpack hook of every region: gives back what ``Frame.pack`` was given."""
    if type(packed) is tuple:
        tensor: torch.Tensor = packed[0]
        if tensor._version != packed[1]:
            raise changed(packed)
        return tensor
    slot: Slot = packed
    value = slot.value
    if value is None:
        value = slot.original()
        if value is None:
            return slot.frame.give(slot)
    slot.given = True
    return value


def changed(free: Free) -> InputChangedError:
    """The error for a tensor that was there before the region and was modified since."""
    tensor, version, frame = free
    where = "" if frame is None else f" in region {frame.region.name!r}"
    return InputChangedError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {tuple(tensor.shape)} saved{where} had version {version} and now has version {tensor._version}; "
        "do the modification after backward, or on a copy"
    )
