"""One call of a region, or of a segment of sibling modules: what was passed in, what autograd saved, how to get it back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._call import Call, Held, Made
from lowtide.engine._replay import replay
from lowtide.engine._slot import Slot
from lowtide.engine._tree import tensors_in
from lowtide.errors import InputChangedError

if TYPE_CHECKING:
    from lowtide.engine._region import Region

Meta = tuple[Any, ...]
_making_lock = threading.Lock()


class Frame:
    """What is kept of a call until backward is through with it.

    Attributes:
        region: what was called.
        calls: the member calls so far; one, unless the region is a segment.
        held: the tensor inputs; packed by the hooks around the region where there are any.
        metas: shape, dtype and strides of every tensor that autograd saved, in order.
        slots: for each of them its slot, weakly; ``None`` for what was kept as it is.
    """

    __slots__ = (
        "__weakref__", "_around", "_lock", "_made", "calls", "held", "held_ids", "held_versions", "metas", "region", "slots",
    )  # fmt: skip

    def __init__(self, region: Region) -> None:
        self.region = region
        self.calls: list[Call] = []
        self.held: list[Any] = []
        self.held_ids: dict[int, Held] = {}
        self.held_versions: list[int] = []
        self.metas: list[Meta] = []
        self.slots: list[weakref.ref[Slot] | None] = []
        self._around = private.top_hooks()
        self._lock: threading.RLock | None = None
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, Made]] = {}

    def keep(self, tensor: torch.Tensor) -> Held | Made:
        """Hold an input of the call that is being entered, unless an earlier member made it."""
        known = self.held_ids.get(id(tensor))
        if known is not None:
            return known
        made = self._made.get(id(tensor))
        if made is not None and made[0]() is tensor and made[1] == tensor._version:
            return made[2]
        held = self.held_ids[id(tensor)] = Held(len(self.held), tensor.requires_grad)
        self.held.append(tensor if self._around is None else self._pack_around(tensor))
        self.held_versions.append(-1 if tensor.is_inference() else tensor._version)
        return held

    def _pack_around(self, tensor: torch.Tensor) -> Any:
        """Give an input to the hooks around the region: an outer region drops it, an offloading hook moves it."""
        assert self._around is not None
        with torch.no_grad():
            return self._around[0](tensor)

    def fetch_held(self, held: Held) -> torch.Tensor:
        """An input of the call as it was.

        Raises:
            InputChangedError: it was modified since.
        """
        kept = self.held[held.index]
        if self._around is None:
            if not kept.is_inference() and kept._version != self.held_versions[held.index]:
                raise self._input_changed(held, kept)
            return kept  # type: ignore[no-any-return]
        with torch.no_grad():
            tensor = self._around[1](kept)
        if tensor.requires_grad == held.requires_grad:
            return tensor
        return tensor.detach().requires_grad_(held.requires_grad)

    def _input_changed(self, held: Held, tensor: torch.Tensor) -> InputChangedError:
        names = [name for call in self.calls for name in call.names_of(held)]
        return InputChangedError(
            f"region {self.region.name!r} needs its input {names[0] if names else '?'} (shape {tuple(tensor.shape)}) as it was in forward: "
            "one of the variables needed for gradient computation has been modified by an inplace operation "
            f"(version {self.held_versions[held.index]} then, {tensor._version} now); do the modification after backward, or on a copy"
        )

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """The pack hook of the call that was entered last."""
        metas, slots, held = self.metas, self.slots, self.held_ids if self._around is None else {}
        ref = weakref.ref
        frame = self

        def pack(tensor: torch.Tensor) -> Any:
            metas.append(meta_of(tensor))
            version = tensor._version
            if tensor.requires_grad and tensor.is_leaf:
                slots.append(None)
                return (tensor, version, None)
            base = tensor._base
            if base is not None and base._version == version:
                if base.requires_grad and base.is_leaf:
                    slots.append(None)
                    return (tensor, version, None)
                if id(base) in held:
                    slots.append(None)
                    return (tensor.detach(), version, None)
            slot = Slot(tensor)
            slot.frame = frame
            slot.index = len(slots)
            slot.version = version
            slot.value = None
            slot.given = False
            slots.append(ref(slot))
            return slot

        return pack

    def remember_results(self, result: Any) -> None:
        """Note what a member returned: it need not be held when a later member is given it."""
        call = len(self.calls) - 1
        for leaf, tensor in enumerate(tensors_in(result)):
            self._made[id(tensor)] = (weakref.ref(tensor), tensor._version, Made(call, leaf))

    def joins(self, tensors: list[torch.Tensor]) -> bool:
        """Whether one of these is what an earlier member returned, unchanged."""
        found = (self._made.get(id(tensor)) for tensor in tensors)
        return any(made is not None and made[0]() is tensor for made, tensor in zip(found, tensors, strict=True))

    def close(self) -> None:
        """No member will join any more: what only entering needed is let go."""
        self.held_ids = {}
        self._made = {}

    def give(self, slot: Slot) -> torch.Tensor:
        """The tensor of a slot that is gone: replay the call up to the last slot that backward may still want."""
        with self._claim():
            if slot.value is None:
                replay(self, slot)
        value = slot.value
        assert value is not None
        slot.given = True
        if not private.in_backward():
            self.drop_values()
        return value

    def drop_values(self, *, given_only: bool = False) -> None:
        """Let go of what replays made, or of what backward has had of it: it is made again when it is asked for again."""
        for ref in self.slots:
            slot = None if ref is None else ref()
            if slot is not None and (slot.given or not given_only):
                slot.value = None
                slot.given = False

    def _claim(self) -> threading.RLock:
        """The lock of this call: two backwards may ask for its slots at once."""
        if self._lock is None:
            with _making_lock:
                if self._lock is None:
                    self._lock = threading.RLock()
        return self._lock


def meta_of(tensor: torch.Tensor) -> Meta:
    """What must be the same in a replay, and the strides, which are told in errors."""
    try:
        return (tensor.shape, tensor.dtype, tensor.device, tensor.stride())
    except RuntimeError:
        return (tensor.layout, tensor.dtype, tensor.device, None)
