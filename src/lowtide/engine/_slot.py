"""What autograd holds in place of a tensor that it saved inside a region.

A slot refers to the saved tensor weakly: while something else keeps the tensor alive (a kept
output, the input of the next region) backward gets that very tensor and nothing is replayed. A replay puts the tensor it
made into the slot, so that it lives exactly as long as autograd holds the slot: the region reaches its slots only weakly.

    autograd node ──▶ Slot ──▶ Frame ──▶ inputs of the call
                       ▲          │
                       └──weakly──┘

A leaf that requires gradients is a parameter, not an activation: it is held as it is, with the version that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide._torch_private import fix_weakly_held
from lowtide.engine._acceleration import native
from lowtide.errors import InputChangedError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._region import Region

Free = tuple[torch.Tensor, int, "Region"]


def gone() -> None:
    """What a slot refers to whose tensor nobody else keeps."""


class _Fields:
    """What is in a slot; where the engine is compiled, so are they."""

    __slots__ = ("__weakref__", "dtype", "frame", "given", "index", "ref", "shape", "value", "version")
    dtype: torch.dtype
    frame: Frame
    given: bool
    index: int
    ref: Callable[[], torch.Tensor | None]
    shape: Any
    value: torch.Tensor | None
    version: int


if native is not None and not TYPE_CHECKING:
    _Fields = native.Slot


class Slot(_Fields):
    """One dropped tensor. The reference to it is a plain ``weakref.ref``: CPython crashes on subclasses of it that die together.

    Attributes:
        ref: the tensor that was saved, while it is alive; ``gone`` where it was seen to be gone by the time backward asks.
        frame: the call it was saved in.
        shape, dtype: of the tensor; no shape for a layout that has none.
        index: its place among all tensors saved in the call.
        version: of the tensor when it was saved: in the forward, and of ``value`` in the replay once there was one.
        value: what a replay made of it.
        given: whether backward has had ``value``.
    """

    __slots__ = ()

    def original(self) -> torch.Tensor | None:
        """The saved tensor itself, if it is still alive and unchanged."""
        tensor = None if self.ref is gone else self.ref()
        if tensor is None:
            return None
        fix_weakly_held(tensor)
        return tensor if tensor._version == self.version else None

    def put(self, tensor: torch.Tensor) -> None:
        """Fill it."""
        self.value = tensor.detach()
        self.version = tensor._version


def check_unchanged(tensor: torch.Tensor, version: int, region: Region) -> None:
    """Raise what plain autograd raises for a saved tensor that was modified.

    Raises:
        InputChangedError: it was.
    """
    if tensor._version != version:
        raise InputChangedError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {tuple(tensor.shape)} saved in region {region.name!r} had version {version}, now it has version "
            f"{tensor._version}; do the modification after backward, or on a copy"
        )
