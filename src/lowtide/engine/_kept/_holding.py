"""The forward of a region that keeps results: noting what autograd saves inside the kept calls, and holding what they return."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._kept._applied import KeptApplied
from lowtide.engine._kept._finding import Finder, Key, Pack
from lowtide.engine._kept._kept import After, Around, Holder, Kept, Result, is_own, kinds_of
from lowtide.engine._kept._learned import is_applied
from lowtide.engine._kept._origins import ELSEWHERE, INSIDE, Known, Origin, origin_of
from lowtide.engine._slot import Slot
from lowtide.engine._sources import calling_frame, site_of
from lowtide.engine._tower import tower

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._learned import Choice, Learned, Traits


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
        frame, call: of the region.
        learned: what is known of such calls.
        kept: what is held.
        free: memory of results that are held: by its key, the version of what is in it.
        sites: of each call of a function that is ever kept, and of a module by its ``id``, from where it was called.
    """

    def __init__(self, frame: Frame, call: Call, learned: Learned, choice: Choice, pack: Pack) -> None:
        self.kept: dict[Key, Kept] = {}
        self.free: dict[int, int] = {}
        self.sites: dict[Any, list[int]] = {key: [] for key in choice.indices}
        self.call, self.learned = call, learned
        self.frame, self._now = frame, _Now()
        if frame.packs_kept:
            super().__init__(choice, _packing_around(self._now, pack), learned.asks)
        else:
            super().__init__(choice, _packing(frame, self._now, self.free, learned, pack), learned.asks)

    def counted(self, key: Any, site: int) -> int:
        """The next one."""
        sites = self.sites[key]
        sites.append(site)
        return len(sites) - 1

    def calls(self) -> dict[Any, int]:
        """As many as there were."""
        return {key: len(sites) for key, sites in self.sites.items()}

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
        now = self._now
        try:
            versions = [*map(_version_of, given)]
        except RuntimeError:  # tensors of inference mode have none
            return run(*args, **kwargs)
        if now.given is not None:
            return run(*args, **kwargs)
        kept = Kept(len(self.frame.slots), kinds_of(given))
        now.given, now.versions, now.origins = given, versions, kept.origins
        try:
            result = run(*args, **kwargs)
        finally:
            inside, now.given = now.inside, None
            if inside:
                now.inside = []
        traits = self.choice.traits[key[0]]
        if versions != [*map(_version_of, given)] and not traits.writes_statistics:
            return result
        frame, plain = self.frame, type(result) is torch.Tensor and not self.learned.copied
        if not plain or frame.packs_kept or self.call.audited or private.function_mode_count():
            with private.without_function_modes(), tower.silence():
                self._hold(key, kept, result, given, inside, traits)
        elif is_own(result, given):
            version = None if traits.fills_later or result.is_inference() else result._version
            kept.result = Result(len(frame.held), result.requires_grad, version, False)
            kept.results = (kept.result,)
            frame.held.append(result.detach())
            self.kept[key] = kept
            if version is not None:
                self.free[private.storage_key(result)] = version
            if inside:
                self._settle(key, kept, inside)
        if not traits.never_draws:
            self._note_after(key, kept, args, kwargs)
        return result

    def kept_apply(self, key: Key, run: Callable[..., Any], args: Any, context: Any, given: list[torch.Tensor]) -> Any:
        """Run the forward of an autograd Function, and hold its results and what it has its context save."""
        try:
            versions = [*map(_version_of, given)]
        except RuntimeError:
            return run(*args)
        result = run(*args)
        if self._now.given is None and versions == [*map(_version_of, given)]:
            with private.without_function_modes(), tower.silence():
                kept = KeptApplied(len(self.frame.slots), kinds_of(given))
                if kept.hold_applied(Holder(self.frame, key in self.learned.copied), result, context, given, versions):
                    self.kept[key] = kept
                    self._note_held(kept)
                    self._note_after(key, kept, args, {})
        return result

    def _note_held(self, kept: Kept) -> None:
        for held in kept.results if not self.frame.packs_kept else ():
            if held.version is not None:
                self.free[private.storage_key(self.frame.held[held.index])] = held.version

    def _hold(
        self, key: Key, kept: Kept, result: Any, given: list[torch.Tensor], inside: list[tuple[int, torch.Tensor]], traits: Traits
    ) -> None:
        frame = self.frame
        if not kept.hold(Holder(frame, key in self.learned.copied, not traits.fills_later), result, given):
            return
        self.kept[key] = kept
        if frame.packs_kept:
            for place, tensor in inside:
                kept.origins[place] = Around(frame.hold(tensor))
            return
        self._note_held(kept)
        self._settle(key, kept, inside)

    def _settle(self, key: Key, kept: Kept, inside: list[tuple[int, torch.Tensor]]) -> None:
        """An op may fill a tensor after it was saved, as noise is; nobody else can have written to it yet."""
        if type(key[0]) is int:
            return
        for place, tensor in inside:
            ref = self.frame.slots[kept.first + place]
            slot = None if ref is None else ref()
            if slot is not None:
                slot.version = tensor._version

    def _note_after(self, key: Key, kept: Kept, args: Any, kwargs: Any) -> None:
        is_whole = type(key[0]) is int or is_applied(key[0])  # anything may be called in it
        if is_whole:
            states = [value for value, _ in self.call.states]
        else:
            states = [value for value in (*args, *kwargs.values()) if type(value) is torch.Generator]
        drawn = states if states or self.call.profile.torch_random else None
        if is_whole:
            kept.after = After(self.calls(), self.place, drawn)
        elif drawn is not None:
            kept.after = After(None, self.place, drawn)


_version_of = attrgetter("_version")


def _packing(  # noqa: C901 – one straight line, for every saved tensor pays it
    frame: Frame, now: _Now, free: dict[int, int], learned: Learned, pack: Pack
) -> Pack:
    """The pack hook where the region itself holds what is kept: that needs no slot.

    To see that a tensor shares memory with a result that is held takes as long as to save it, so that is only looked for where it
    was so in the call before: to miss one costs a replay at most.
    """
    slots, region, key_of, version_of, add = frame.slots, frame.region, private.storage_key, free.get, frame.slots.append
    known = learned.free
    count = 0 if known is None else len(known)
    found: list[bool] | None = None
    if known is None:
        found = learned.free = []

    def pack_kept(tensor: torch.Tensor) -> Any:
        place, version = len(slots), None
        if place >= count or known[place]:  # type: ignore[index]
            if free and not tensor.is_leaf:
                version = version_of(key_of(tensor))
                if version is not None and tensor._version != version:
                    version = None
            if found is not None and place == len(found):
                found.append(version is not None)
        if version is None:
            packed: Any = pack(tensor)
        else:
            add(None)
            packed = tensor.detach(), version, region
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
        add(site_of(calling_frame(caller(1))))
        return pack(tensor)

    return note_and_pack


def _is_parameter(tensor: torch.Tensor) -> bool:
    root = tensor if tensor._base is None else tensor._base
    return isinstance(root, nn.Parameter)
