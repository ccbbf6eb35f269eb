"""A region: something that can be called, whose calls are replayed in backward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._audit import Audit
from lowtide.engine._call import Call
from lowtide.engine._frame import Frame
from lowtide.engine._guards._modules import Watch
from lowtide.engine._guards._random import moved
from lowtide.engine._learning import learn_surprises
from lowtide.engine._options import Options
from lowtide.engine._profile import Profile
from lowtide.engine._replay import unpack_in_replay
from lowtide.engine._thread import is_replaying, state
from lowtide.engine._tree import ATOMS
from lowtide.engine._unpack import unpack
from lowtide.engine._values import hash_of


class Region:
    """What all calls of a region share.

    Attributes:
        name: module path or function name, for errors.
        options: as chosen by the user.
        replay_s: seconds spent in its replays so far.
        profile: what audits learned of its code; of the first member in a segment.
    """

    __slots__ = ("__weakref__", "_idle", "_told", "name", "options", "profile", "replay_s")

    def __init__(self, name: str, options: Options) -> None:
        self.name = options.name or name
        self.options = options
        self.replay_s = 0.0
        self.profile: Profile | None = None
        self._told = False
        self._idle: Watch | bool = False
        """Whether the call before saved nothing, and depends on nothing but its arguments and what is watched here."""

    def run(
        self, target: Callable[..., Any], fixed: nn.Module | None, profile: Profile, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``target`` in a frame of its own. Only to be called where gradients are recorded.

        Args:
            target: what to call.
            fixed: the module whose forward it is; ``None`` if it is a function that may refer to anything.
            profile: what is known of it.
            args, kwargs: its arguments.
        """
        if self._idle is not False and not kwargs and _needs_no_gradients(self._idle, args) and private.top_hooks() is None:
            return target(*args)  # a region around it was handed its inputs in forward, and has to be in the replay
        if not hooks_work():
            return self._run_plain(target, args, kwargs)
        frame = Frame(self)
        if state.depth and not state.keeps:
            return self._run_in_replay(frame, target, fixed, profile, args, kwargs)
        result = self.enter(frame, target, fixed, profile, args, kwargs)
        self._idle = not frame.slots and _only_watched(frame.calls[0], target)
        return result

    def enter(
        self,
        frame: Frame,
        target: Callable[..., Any],
        fixed: nn.Module | None,
        profile: Profile,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call ``target`` as the next member of a frame."""
        self.profile = profile
        frame.enter(profile.copied)
        call = Call(frame, target, fixed, profile, args, kwargs)
        frame.calls.append(call)
        frame.running = True
        profile.left -= 1
        crowded = (profile.torch_random or profile.left < 0) and threading.active_count() > 1
        if not is_replaying() and (profile.left < 0 or _is_news(call)):
            call.audited = True
            result = Audit(frame, call).run(target, args, kwargs)
        else:
            result = self._run_watched(frame, target, args, kwargs)
        if profile.torch_random and (crowded or threading.active_count() > 1):
            call.random_end = torch.default_generator.clone_state()
        call.draws = profile.torch_random or call.audited or moved(call.random)
        frame.leave(call)
        for watch, taken in call.watches:
            rebound = watch.rebound(taken)
            if rebound:
                learn_surprises(call, watch, rebound)
        return result

    @staticmethod
    def _run_in_replay(
        frame: Frame, target: Callable[..., Any], fixed: nn.Module | None, profile: Profile, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Nobody goes backward through a region inside a replay: it only has to hand its inputs to the hooks around it, as in forward."""
        frame.enter(profile.copied)
        Call(frame, target, fixed, profile, args, kwargs, passing=True)
        private.push_hooks(_forget, unpack_in_replay)
        try:
            return target(*args, **kwargs)
        finally:
            private.pop_hooks()

    def _run_watched(self, frame: Frame, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pack = frame.pack_hook()
        if self.options.check_values:
            pack = self._hashing(frame, pack)
        private.push_hooks(pack if frame.calls[-1].fixed else frame.note_sites(pack), unpack)
        try:
            return target(*args, **kwargs)
        finally:
            private.pop_hooks()

    @staticmethod
    def _hashing(frame: Frame, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if frame.hashes is None:
            frame.hashes = {}
        hashes, slots = frame.hashes, frame.slots

        def pack_and_hash(tensor: Any) -> Any:
            hashes[len(slots)] = hash_of(tensor)
            return pack(tensor)

        return pack_and_hash

    def _run_plain(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Function transforms forbid hooks: gradients are right, no memory is saved."""
        if not self._told:
            self._told = True
            warnings.warn(f"region {self.name!r} runs under a function transform (torch.func), where no memory can be saved", stacklevel=4)
        return target(*args, **kwargs)


def _forget(_: torch.Tensor) -> None:
    """Saves nothing."""


def _only_watched(call: Call, target: Any) -> Watch | bool:
    """The module whose forward it is; true for a function that can refer to nothing that changes."""
    if call.fixed:
        return call.watches[0][0] if len(call.watches) == 1 and not is_replaying() else False
    return call.target is target and isinstance(target, (FunctionType, BuiltinFunctionType)) and not call.watches


def _needs_no_gradients(watched: Watch | bool, args: tuple[Any, ...]) -> bool:
    """Whether a call saves nothing for backward, so that it can be left alone. Were it wrong, it would only save no memory."""
    for arg in args:
        if arg.requires_grad if type(arg) is torch.Tensor else type(arg) not in ATOMS:
            return False
    if watched is True:
        return True
    assert isinstance(watched, Watch)
    return not any(tensor is not None and tensor.requires_grad for tensor in watched.tensors())


def hooks_work() -> bool:
    """Whether saved-tensor hooks can be used here: function transforms forbid them."""
    return private.hooks_allowed() and not private.functorch_active()


def _is_news(call: Call) -> bool:
    """Whether a module is run that was not yet watched, or one in other training modes than it was, or with other flags."""
    for watch, taken in call.watches:
        if not watch.audited or taken[2] not in watch.trainings:
            return True
    return call.news or call.profile.is_news(call.flags())
