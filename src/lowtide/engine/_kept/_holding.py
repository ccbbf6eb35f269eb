"""The forward of a region that keeps results: noting what autograd saves inside the kept calls, and holding what they return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._kept._finding import Finder, Key, Pack
from lowtide.engine._kept._kept import Around, Holder, Kept, is_own
from lowtide.engine._kept._origins import ELSEWHERE, INSIDE, Known, Origin, origin_of
from lowtide.engine._slot import Slot
from lowtide.engine._sources import calling_frame
from lowtide.engine._tower import tower

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._learned import Choice, Learned


class _Now:
    """The kept call that runs. Autograd holds the pack hook, and so this, as long as what it saved: nothing is left in it in between.

    Attributes:
        given: the tensors it was given; ``None`` if none runs.
        versions: of these.
        origins: of what autograd saved in it so far.
        inside: what was made in it, with its place among these.
    """

    __slots__ = ("given", "inside", "origins", "versions")

    def __init__(self) -> None:
        self.given: list[torch.Tensor] | None = None
        self.versions: list[int] = []
        self.origins: list[Origin | Around] = []
        self.inside: list[tuple[int, torch.Tensor]] = []


class Holding(Finder):
    """Finds the kept calls of a forward.

    Attributes:
        call: of the region.
        learned: what is known of such calls.
        kept: what is held.
        free: memory of results that are held: by its key, the version of what is in it.
    """

    def __init__(self, frame: Frame, call: Call, learned: Learned, choice: Choice, pack: Pack) -> None:
        self.kept: dict[Key, Kept] = {}
        self.free: dict[int, int] = {}
        self.call, self.learned = call, learned
        self._frame, self._now = frame, _Now()
        super().__init__(choice, _packing_around(self._now, pack) if frame.packs_kept else _packing(frame, self._now, self.free, pack))

    @property
    def pack(self) -> Pack:
        """The pack hook to run the region under."""
        return self._pack

    def listen_to(self, hook: Pack) -> Pack:
        """The region is run under another hook, which calls this one's."""
        self._pack = hook
        return hook

    def kept_call(self, key: Key, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Run it, noting what autograd saves, and hold its result."""
        now, versions = self._now, _versions(given)
        if versions is None or now.given is not None:
            return run(*args, **kwargs)
        kept = Kept(len(self._frame.slots), [tensor.shape for tensor in given])
        now.given, now.versions, now.origins = given, versions, kept.origins
        try:
            result = run(*args, **kwargs)
        finally:
            inside, now.given, now.inside = now.inside, None, []
        if versions == _versions(given) or is_batch_norm(key[0]):
            if self.call.audited or private.function_mode_count():
                with private.without_function_modes(), tower.silence():
                    self._hold(key, kept, result, given, inside)
            else:
                self._hold(key, kept, result, given, inside)
            self._note_random(key, kept, args, kwargs)
        return result

    def _hold(self, key: Key, kept: Kept, result: Any, given: list[torch.Tensor], inside: list[tuple[int, torch.Tensor]]) -> None:
        frame, copied, settled = self._frame, key in self.learned.copied, not _fills_later(key[0])
        if type(result) is torch.Tensor and not copied and not frame.packs_kept:
            if not is_own(result, given):
                return
            kept.hold_tensor(frame, result, settled)
        elif not kept.hold(Holder(frame, copied, settled), result, given):
            return
        self.kept[key] = kept
        if frame.packs_kept:
            for place, tensor in inside:
                kept.origins[place] = Around(frame.hold(tensor))
            return
        if inside and type(key[0]) is not int:
            for place, tensor in inside:
                self._settle(kept.first + place, tensor)
        for held in kept.results:
            if held.version is not None:
                self.free[private.storage_key(frame.held[held.index])] = held.version

    def _settle(self, index: int, tensor: torch.Tensor) -> None:
        """An op may fill a tensor after it was saved, as noise is; nobody else can have written to it yet."""
        ref = self._frame.slots[index]
        slot = None if ref is None else ref()
        if slot is not None:
            slot.version = tensor._version

    def _note_random(self, key: Key, kept: Kept, args: Any, kwargs: Any) -> None:
        if type(key[0]) is int:
            kept.calls = dict(self.calls)
            states = [value for value, _ in self.call.states]
        else:
            states = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
            if not states and getattr(key[0], "__name__", "") in _NEVER_DRAW:
                return
        if states or self.call.profile.torch_random:
            kept.note_random(states)


def _fills_later(function: Any) -> bool:
    """Whether it is a collective: its result is filled, and has another version, at a time that differs from process to process."""
    space = getattr(function, "namespace", None) or str(getattr(function, "_qualified_op_name", "")).partition("::")[0]
    return space in _COLLECTIVES


_COLLECTIVES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor"})
_NEVER_DRAW = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "layer_norm", "rms_norm", "group_norm"}
    | {"batch_norm", "gelu", "silu", "relu", "tanh", "sigmoid", "softmax", "log_softmax", "cross_entropy", "topk", "add", "mul", "cat"}
)
"""Where a region draws, it is noted after each kept call where that left the generators; but not after calls of these."""


def _versions(given: list[torch.Tensor]) -> list[int] | None:
    """Of each tensor; ``None`` if one is of inference mode, for those have none."""
    try:
        return [tensor._version for tensor in given]
    except RuntimeError:
        return None


def _packing(frame: Frame, now: _Now, free: dict[int, int], pack: Pack) -> Pack:
    """The pack hook where the region itself holds what is kept: that needs no slot."""
    slots, region, key_of, version_of = frame.slots, frame.region, private.storage_key, free.get

    def pack_kept(tensor: torch.Tensor) -> Any:
        version = None if tensor.is_leaf or not free else version_of(key_of(tensor))
        if version is not None and tensor._version == version:
            slots.append(None)
            packed: Any = tensor.detach(), version, region
        else:
            packed = pack(tensor)
        given = now.given
        if given is None:
            return packed
        if type(packed) is not Slot:
            now.origins.append(ELSEWHERE)
            return packed
        origin = origin_of(tensor, given, now.versions)
        if origin is INSIDE:
            now.inside.append((len(now.origins), tensor))
            packed.put(tensor)
        now.origins.append(origin)
        return packed

    return pack_kept


def _packing_around(now: _Now, pack: Pack) -> Pack:
    """The pack hook where hooks around the region hold it. They are handed the same in a replay, where nothing else may matter."""

    def pack_around(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        if now.given is None:
            return packed
        if _is_parameter(tensor):
            origin: Origin = Known(tensor.detach()) if type(packed) is Slot else ELSEWHERE
        else:
            origin = origin_of(tensor, now.given, now.versions)
        if origin is INSIDE:
            now.inside.append((len(now.origins), tensor))
        now.origins.append(origin)
        return packed

    return pack_around


def noting_sites(frame: Frame, pack: Pack) -> Pack:
    """The pack hook of a function, noting from where in the user's code it is called."""
    add, caller = frame.sites.append, sys._getframe

    def note_and_pack(tensor: torch.Tensor) -> Any:
        code = calling_frame(caller(1))
        add(id(code.f_code) + code.f_lasti)
        return pack(tensor)

    return note_and_pack


def is_batch_norm(function: Any) -> bool:
    """It writes to running statistics among its arguments; a replay is given copies of those, which nobody sees afterwards."""
    return "batch_norm" in getattr(function, "__name__", "")


def _is_parameter(tensor: torch.Tensor) -> bool:
    root = tensor if tensor._base is None else tensor._base
    return isinstance(root, nn.Parameter)
