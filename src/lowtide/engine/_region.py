"""A region: something that can be called, whose calls are replayed in backward."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine import _native_parts as _native_parts  # what is compiled is given what it uses
from lowtide.engine._audit import Audit
from lowtide.engine._call import Call, NotInitializedError
from lowtide.engine._clock import clock, enter_at
from lowtide.engine._frame import Frame
from lowtide.engine._guards._modules import Watch
from lowtide.engine._guards._random import moved, take_cpu
from lowtide.engine._guards._running import heard_by
from lowtide.engine._kept._holding import noting_sites
from lowtide.engine._kept._keeping import holding_for, run_finding, run_holding
from lowtide.engine._kept._learned import Learned, learned_of
from lowtide.engine._learning import learn_surprises
from lowtide.engine._meeting import Meeting
from lowtide.engine._observers import tell_entered, tell_entering, tell_left
from lowtide.engine._options import Options
from lowtide.engine._packing import forget
from lowtide.engine._profile import Profile
from lowtide.engine._replay import unpack_in_replay
from lowtide.engine._steady import NEWS, is_settled
from lowtide.engine._thread import hooks_work, is_replaying, state
from lowtide.engine._tower import tower
from lowtide.engine._transforms import transforms_allowed_in
from lowtide.engine._tree import ATOMS
from lowtide.engine._unpack import unpack
from lowtide.engine._values import hash_of
from lowtide.engine._when_steady import steady_of

_NOBODY = nullcontext()


class Listener(Protocol):
    """Wants to know when a region runs. What it raises goes to the user."""

    def called(self, region: str, /) -> None: ...
    def replayed(self) -> None: ...


class Region:
    """What all calls of a region share.

    Attributes:
        name: module path or function name, for errors.
        options: as chosen by the user.
        replay_s: seconds spent in its replays so far.
        profile: what audits learned of its code; of the first member in a segment.
        listener: is told of calls and replays, as long as somebody wants to know.
    """

    __slots__ = ("__weakref__", "_idle", "_told", "listener", "name", "options", "profile", "replay_s")

    def __init__(self, name: str, options: Options) -> None:
        self.name = options.name or name
        self.options = options
        self.replay_s = 0.0
        self.profile: Profile | None = None
        self.listener: Listener | None = None
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
        if profile.steady is not None and not kwargs:
            result = profile.steady.run(self, target, args)
            if result is not NEWS:
                return result
        if not hooks_work():
            return self._run_plain(target, args, kwargs)
        if state.depth and not state.keeps:
            plain = not kwargs and not profile.copied and self.options.policy is None and _are_plain(args)
            if plain and (fixed is not None or is_settled(target)):
                return _run_forgetting(target, args)
            return self.run_in_replay(Frame(self), target, fixed, profile, args, kwargs)
        frame = Frame(self)
        result = self.enter(frame, target, fixed, profile, args, kwargs)
        if not frame.calls:
            return result
        profile.steady = steady_of(frame, frame.calls[0])
        kept = frame.calls[0].kept
        if kept is not None:
            kept.trim(frame)
        self._idle = not frame.slots and _only_watched(frame.calls[0], target)
        return result

    def run_member(
        self,
        frame: Frame,
        target: Callable[..., Any],
        module: nn.Module | None,
        profile: Profile,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call the forward of a module, or a function, as the next member of a frame."""
        if profile.steady is not None and not kwargs:
            result = profile.steady.run(self, target, args, frame)
            if result is not NEWS:
                return result
        before = len(frame.calls)
        result = self.enter(frame, target, module, profile, args, kwargs)
        if len(frame.calls) > before and module is not None:  # what is known of a function has nobody to let go of it
            profile.steady = steady_of(frame, frame.calls[-1])
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
        """Call ``target`` as the next member of a frame, or on its own if its module is not initialized yet."""
        if self.listener is not None and not frame.calls:
            self.listener.called(self.name)
        self.profile = profile
        tell_entering(self, profile)
        frame.enter(profile.copied)
        try:
            call = Call(frame, target, fixed, profile, args, kwargs)
        except NotInitializedError:
            return target(*args, **kwargs)
        frame.calls.append(call)
        tell_entered(frame, call)
        frame.running = True
        profile.left -= 1
        crowded = (profile.torch_random or profile.left < 0) and threading.active_count() > 1
        around = state.since
        state.since = enter_at(frame) if clock.now else 0
        inside_audit = bool(tower.viewers)
        if inside_audit:
            tower.unwatched.append(call)
        try:
            result = self._run_member(frame, call, target, args, kwargs)
        except BaseException:
            call.met.clear()
            frame.give_up()
            raise
        finally:
            state.since = around
            if inside_audit:
                tower.unwatched.pop()
        if profile.torch_random and (crowded or threading.active_count() > 1):
            call.random_end = take_cpu()
        call.draws = profile.torch_random or call.audited or moved(call.random)
        if call.kept is not None and call.draws and not (profile.torch_random or call.audited):
            call.kept.forget(frame)  # which of its calls drew is not known
        call.met.clear()
        frame.leave(call)
        for watch, taken in call.watches:
            rebound = watch.rebound(taken)
            if rebound:
                learn_surprises(call, watch, rebound)
        tell_left(frame, call)
        return result

    def _run_member(self, frame: Frame, call: Call, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        policy = self.options.policy
        learned = None if policy is None else learned_of(call, policy)
        undecided = policy is not None and learned is None
        if not is_replaying() and (call.profile.left < 0 or undecided or _is_news(call)):
            call.audited = True
            return Audit(frame, call, target, learned).run(target, args, kwargs)
        return self._run_watched(frame, learned, target, args, kwargs)

    @staticmethod
    def run_in_replay(
        frame: Frame, target: Callable[..., Any], fixed: nn.Module | None, profile: Profile, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Nobody goes backward through a region inside a replay: it only has to hand its inputs to the hooks around it, as in forward."""
        frame.enter(profile.copied)
        policy = frame.region.options.policy
        call = Call(frame, target, fixed, profile, args, kwargs, passing=policy is None)
        learned = None if policy is None else learned_of(call, policy)
        holding = None if learned is None else holding_for(frame, call, learned, forget)
        if not frame.packs_kept:
            holding = None
        private.push_hooks(forget if holding is None else holding.pack, unpack_in_replay)
        try:
            return target(*args, **kwargs) if holding is None else run_finding(holding, target, args, kwargs)
        finally:
            private.pop_hooks()
            frame.inputs = {}

    def _run_watched(
        self, frame: Frame, learned: Learned | None, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call, pack = frame.calls[-1], self._pack_hook(frame)
        holding = None if learned is None else holding_for(frame, call, learned, pack)
        if holding is not None:
            hook = holding.pack if call.fixed else holding.listen_to(noting_sites(frame, holding.pack))
        else:
            hook = pack if call.fixed else frame.note_sites(pack)
        private.push_hooks(frame.mark(hook), unpack)
        try:
            with (
                heard_by(Meeting(call)) if call.profile.meets and not is_replaying() else _NOBODY,
                transforms_allowed_in(call),
            ):
                return target(*args, **kwargs) if holding is None else run_holding(holding, target, args, kwargs)
        finally:
            private.pop_hooks()

    def _pack_hook(self, frame: Frame) -> Callable[[torch.Tensor], Any]:
        pack = frame.pack_hook()
        return self._hashing(frame, pack) if self.options.check_values or frame.calls[-1].profile.unsteady else pack

    @staticmethod
    def _hashing(frame: Frame, pack: Callable[[Any], Any]) -> Callable[[Any], Any]:
        if frame.hashes is None:
            frame.hashes = {}
        hashes, slots = frame.hashes, frame.slots

        def pack_and_hash(tensor: Any) -> Any:
            hashes[len(slots)] = hash_of(tensor)
            return pack(tensor)

        return pack_and_hash

    def tell_plain(self) -> None:
        """Say, but only once, that it saves no memory here."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"region {self.name!r} runs under a function transform (torch.func) or in forward mode, where no memory can be saved",
                stacklevel=5,
            )

    def _run_plain(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Under function transforms and forward-mode derivatives: gradients are right, no memory is saved."""
        self.tell_plain()
        return target(*args, **kwargs)


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Whether there is nothing in the arguments that would have to be taken apart."""
    for arg in args:  # noqa: SIM110 – a generator takes longer
        if type(arg) is not torch.Tensor and type(arg) not in ATOMS:
            return False
    return True


def _run_forgetting(target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What ``run_in_replay`` comes to where there is nothing to take apart: the hooks around are handed each of the tensors once."""
    around = private.top_hooks()
    if around is not None:
        grad = torch.is_grad_enabled()
        private.set_grad_enabled(False)
        try:
            for tensor in {id(arg): arg for arg in args if type(arg) is torch.Tensor}.values():
                if not tensor.is_inference():  # see Frame.keep
                    around[0](tensor)
        finally:
            private.set_grad_enabled(grad)
    private.push_hooks(forget, unpack_in_replay)
    try:
        return target(*args)
    finally:
        private.pop_hooks()


def _only_watched(call: Call, target: Any) -> Watch | bool:
    """The module whose forward it is; true for a function that can refer to nothing that changes."""
    if call.profile.meets:
        return False
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


def _is_news(call: Call) -> bool:
    """Whether a module is run that was not yet watched, or one in other training modes than it was, or with other flags."""
    way = call.way()
    for watch, taken in call.watches:
        if not watch.audited or taken[2] not in watch.trainings or watch.is_news(way):
            return True
    return call.news or call.profile.is_news(call.flags())
