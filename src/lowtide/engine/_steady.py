"""Calls that go the way of the call before, taken down in as few steps as that takes.

Most calls need little of what a call may need: the module is the same, its attributes stay what they are, nothing but tensors is given
to it. Or it is no module but nothing in it can change: a function without variables of its own, an object with the same attributes.
Once a call has shown to be of that kind, those after it come this way, and so do their replays. The guards are the same ones;
those that had nothing to guard are left out, and what they looked at is compared with what it was when they had nothing: the modules in
the module, their training flags, the kinds of arguments, what audits learned. Whatever is new sends a call, or a replay, the long way.

The code below is one straight line each for the call and its replay, for it runs for every region of every step: a step of it costs more
than it would seem, since the kernels in between leave little of it in the processor's caches.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._acceleration import native
from lowtide.engine._call import Call
from lowtide.engine._clock import clock, enter_at
from lowtide.engine._frame import Frame
from lowtide.engine._functions import take_function
from lowtide.engine._guards._ambient import Ambient, is_in_force, take_ambient
from lowtide.engine._guards._modules import Taken, Watch
from lowtide.engine._guards._outside import Read, changed
from lowtide.engine._guards._random import moved, put_random, take_cpu, take_random
from lowtide.engine._guards._unmodified import are_in_place, are_unmodified
from lowtide.engine._kept._keeping import Course, run_holding
from lowtide.engine._learning import learn_surprises
from lowtide.engine._observers import OBSERVERS
from lowtide.engine._packing import Filling, last_wanted
from lowtide.engine._parts import Held, Made
from lowtide.engine._replay import KeepAll, unpack_in_replay
from lowtide.engine._short import STOPPED, give_others, replay_members
from lowtide.engine._thread import StopReplay, hooks_work, state
from lowtide.engine._trained import Trained, trained_in
from lowtide.engine._tree import ATOMS, is_mutable, is_ordinary, mutable_types
from lowtide.engine._unpack import unpack

if TYPE_CHECKING:
    from lowtide.engine._kept._keeping import Keeping
    from lowtide.engine._options import Options
    from lowtide.engine._profile import Profile, Script
    from lowtide.engine._region import Region
    from lowtide.engine._slot import Slot

NEWS: Any = object()
"""What comes back for a call that has to go the long way."""
TENSOR: Any = object()
"""Stands for a tensor among the arguments."""
_PLACES = frozenset({Held, Made})


class _Replayed:
    """How calls that went the short way are replayed; where the engine is compiled, that is."""

    def replay(self, frame: Frame, wanted: Slot) -> bool:
        """As ``Call.replay``."""
        return self.replay_in_python(frame, wanted)  # type: ignore[attr-defined, no-any-return]

    def is_known(self, frame: Frame) -> bool:
        """Whether the way it went is known, surroundings and modules are what they were, and nobody looks on."""
        return self.is_known_in_python(frame)  # type: ignore[attr-defined, no-any-return]

    def run_again(self, target: Any, args: list[Any], pack: Callable[[torch.Tensor], None], since: int) -> Any:
        """Call it as it was called, under this pack hook.

        Returns:
            What it returned; ``STOPPED`` if the hook ended it.
        """
        return self.run_again_in_python(target, args, pack, since)  # type: ignore[attr-defined]


class _Fields:
    """What such calls have in common, and how they run; where the engine is compiled, so are both."""

    __slots__ = ("args", "course", "kinds", "known", "modules", "objects", "options", "profile", "script", "sites", "watches")
    args: list[Any]
    course: Course | None
    kinds: int
    known: weakref.ref[Any] | None
    modules: list[weakref.ref[nn.Module]]
    objects: list[weakref.ref[Any]] | None
    options: Options
    profile: Profile
    script: Script
    sites: list[int] | None
    watches: list[tuple[Watch, list[bool], frozenset[int]]]

    def run(self, region: Region, target: Callable[..., Any], args: tuple[Any, ...], frame: Frame | None = None) -> Any:
        """Call ``target``, in a frame of its own or as the next member of one, unless there are news."""
        return self.run_in_python(region, target, args, frame)  # type: ignore[attr-defined]


if native is not None and not TYPE_CHECKING:
    _Replayed, _Fields = native.Replayed, native.Steady


class SteadyCall(_Replayed, Call):
    """A call of which nothing needs to be put back but its module's tensors, and the random state if it draws."""

    # These hide the slots of a call that may need more: what has nothing to say need not be written for each call.
    attributes: Any = ()
    objects: Any = ()
    outside: Any = ()
    states: Any = ()
    kwargs: Any = {}  # noqa: RUF012
    audited = deep = news = passing = False
    kept: Keeping | None = None
    random_end: bytes | None = None
    trained: Trained = ()

    def __init__(self, steady: Steady, target: Any, args: list[Any], taken: list[tuple[Watch, Taken]], ambient: Ambient) -> None:
        self.profile = steady.profile
        self.python_state = steady.options.python_state
        self.target = target
        self.fixed = steady.sites is None
        self.args = args
        self.watches = taken
        self.ambient = ambient
        self.script = None

    def replay_in_python(self, frame: Frame, wanted: Slot) -> bool:
        """Fill the slots that autograd still holds, up to where what follows cannot belong to the op that asked."""
        if len(frame.calls) > 1:
            return replay_members(frame, wanted)
        if not self.is_known(frame):
            return False
        slots, script, kept = frame.slots, self.script, self.kept
        assert script is not None
        if script.others:
            give_others(frame, script.others)
        last = last_wanted(slots, wanted.index, script.reach[wanted.index])
        stop = (script.end if kept is None else script.stop)[last] if frame.region.options.early_stop else sys.maxsize
        target, args, _ = self.arguments(frame, [])
        pack: Any = Filling(slots, last, stop)
        if kept is not None:
            target = kept.returning(frame, pack, lambda: pack.reached + 1, target, stop)
        try:
            self.run_again(target, args, pack, frame.since)
        except RuntimeError as error:
            if not private.is_write_to_leaf(error):
                raise
            stop = -1  # nowhere
        index = pack.reached
        if stop >= 0 and (index == stop or index + 1 == len(slots)) and self.is_unmodified():
            return True
        frame.drop_values()
        return False

    def is_known_in_python(self, frame: Frame) -> bool:
        """As ``is_known``."""
        if self.script is None or frame.hashes is not None or self.random_end is not None:
            return False
        if not are_in_place(self.watches, self.python_state) or trained_in(self.watches) != self.script.trained:
            return False
        mine = vars(state)
        return not (
            OBSERVERS
            or frame.running
            or mine["depth"] > 1
            or mine["finder"] is not None
            or self.profile.differentiates
            or private.profiler_active()
            or not self.finds_the_same()
            or not is_in_force(self.ambient)
        )

    def finds_the_same(self) -> bool:
        """Whether what its code reaches elsewhere, and in objects, is what was there."""
        if self.outside and changed(self.outside):
            return False
        return all(all(map(is_, own.values(), values)) for own, values in self.objects)

    def is_unmodified(self) -> bool:
        """Whether nothing in its modules was written to while it ran again."""
        return are_unmodified(self.watches)

    def run_again_in_python(self, target: Any, args: list[Any], pack: Callable[[torch.Tensor], None], since: int) -> Any:
        """As ``run_again``."""
        timed = clock.now
        if timed:
            around, state.since = state.since, since
        grad = torch.is_grad_enabled()
        random = self._random_as_then() if self.draws else None
        lent: list[tuple[dict[str, Any], str, Any]] = []
        pushed = False
        try:
            for watch, taken in self.watches:
                if watch.written:
                    lent += watch.lend(taken)
            private.set_grad_enabled(True)
            private.push_hooks(pack, unpack_in_replay)
            pushed = True
            return self.ambient[0].copy().run(target, *args)
        except (StopReplay, KeepAll):
            return STOPPED
        finally:
            if pushed:
                private.pop_hooks()
            private.set_grad_enabled(grad)
            for table, name, tensor in reversed(lent):  # one module may be part of another
                table[name] = tensor
            if random is not None:
                put_random(random)
            if timed:
                state.since = around


class Steady(_Fields):
    """What such calls of a module or function have in common.

    Attributes:
        profile, options: of the region they are calls of.
        watches: of the modules that they may run, the module's own first, with the training flags and the statistics that are not copied.
        modules, objects: those that are reached elsewhere, weakly; no objects if one cannot be referred to so.
        known: the object that is called, if it is none but a function or module.
        kinds: how many types of objects regions were seen to change by then.
        script: the way they go.
        sites: where the tensors are saved on it, see ``Frame.sites``; ``None`` for the forward of a module.
        args: for each argument the argument, or a mark if it is a tensor.
        course: which calls are kept; ``None`` without a policy.
    """

    __slots__ = ()

    def __init__(
        self, frame: Frame, call: Call, script: Script, modules: list[nn.Module], objects: list[object], course: Course | None
    ) -> None:
        self.course = course
        self.profile: Profile = call.profile
        self.options = frame.region.options
        self.script = script
        self.sites = None if call.fixed else frame.sites
        code = call.profile.number
        self.watches = [(watch, taken[2], watch.statistics.unread(code, taken[2])) for watch, taken in call.watches]
        self.modules = [*map(weakref.ref, modules)]
        self.objects = [*map(weakref.ref, objects)] if all(type(value).__weakrefoffset__ for value in objects) else None
        self.kinds = mutable_types()
        self.known = None
        if (
            not call.fixed
            and type(call.target) is not FunctionType
            and type(call.target).__weakrefoffset__
            and self.calls_the_same(call.target)
        ):
            self.known = weakref.ref(call.target)
        self.args = [TENSOR if type(arg) in _PLACES else arg for arg in call.args]

    def _is_object(self, target: Any) -> bool:
        return type(target) is not FunctionType and type(target).__weakrefoffset__ != 0 and self.calls_the_same(target)

    def run_in_python(self, region: Region, target: Callable[..., Any], args: tuple[Any, ...], frame: Frame | None) -> Any:
        """As ``run``."""
        profile = self.profile
        if profile.left <= 0 or OBSERVERS or region.listener is not None or region.options is not self.options or state.depth:
            return NEWS
        if not hooks_work() or not self._are_known(args) or not self.calls_the_same(target):
            return NEWS
        if self.course is not None and not self.course.goes_on():
            return NEWS
        outside = self.take_outside() if profile.outside.places else ()
        watches = None if outside is None else self._take_modules()
        if watches is None or outside is None:
            return NEWS
        profile.left -= 1
        region.profile = profile
        return self._run_in_frame(frame or Frame(region), target, args, watches, outside)

    def take_outside(self) -> Sequence[Read] | None:
        """What its code reads from elsewhere, unless there are news."""
        modules, objects = [], []  # type: list[nn.Module], list[object]
        outside = self.profile.outside.take(modules.append, objects)
        if len(outside) != len(self.profile.outside.places) or len(modules) != len(self.modules) or not self.profile.has_met(objects):
            return None
        return outside if all(ref() is module for ref, module in zip(self.modules, modules, strict=True)) else None

    def _take_modules(self) -> list[tuple[Watch, Taken]] | None:
        """What is in the modules, unless there are news, or others of their tensors require gradients."""
        watches = []
        for watch, trainings, unread in self.watches:
            taken = watch.take_again(trainings, unread)
            if taken is None or (taken[3] and not self.profile.outside.knows([*taken[3]])):
                return None
            watches.append((watch, taken))
        return watches if trained_in(watches) == self.script.trained else None

    def _run_in_frame(
        self, frame: Frame, target: Callable[..., Any], args: tuple[Any, ...], watches: list[tuple[Watch, Taken]], outside: Sequence[Read]
    ) -> Any:
        frame.enter_again()
        stored = []
        for arg in args:  # no comprehension: torch.compile cannot read one here
            stored.append(frame.keep(arg) if type(arg) is torch.Tensor else arg)  # noqa: PERF401
        call = SteadyCall(self, target, stored, watches, take_ambient(self.profile.attention))
        call.first = len(frame.slots)
        if outside:
            call.outside = outside
        frame.calls.append(call)
        if self.sites is not None:
            frame.sites, call.objects = [], []
            call.note_object(target)
        result = self._run_drawing(frame, call, target, args)
        if (self.sites is not None and frame.sites != self.sites) or not frame.leave_as(self.script, call):
            self.profile.steady = None
            frame.leave(call)
        if call.kept is not None and not frame.joinable:
            call.kept.trim(frame)
        learn_rebound(call)
        return result

    def calls_the_same(self, target: Any) -> bool:
        """Whether the module is still watched as it was; whether nothing can change in what is no module."""
        if self.sites is None:
            return self.profile.watch is self.watches[0][0]
        return is_settled(target) and self.profile.outside.knows([target])

    def _run_drawing(self, frame: Frame, call: SteadyCall, target: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call it, and keep the state of the generators if it drew."""
        may_draw = self.profile.torch_random
        crowded = may_draw and threading.active_count() > 1
        call.random, call.draws = take_random(), True  # a region may go backward through itself while it runs
        around = state.since
        if clock.now:
            state.since = enter_at(frame)
        pack = frame.pack_hook() if self.sites is None else frame.note_sites(frame.pack_hook())
        holding = None if self.course is None else self.course.holding(frame, call, pack)
        private.push_hooks(frame.mark(pack if holding is None else holding.pack), unpack)
        try:
            result = target(*args) if holding is None else run_holding(holding, target, args, {})
        except BaseException:
            frame.give_up()
            raise
        finally:
            private.pop_hooks()
            if clock.now:
                state.since = around
        if not may_draw and not moved(call.random):
            call.draws = False
            del call.random
        elif not may_draw and call.kept is not None:
            call.kept.forget(frame)  # which of its calls drew is not known
        elif may_draw and (crowded or threading.active_count() > 1):
            call.random_end = take_cpu()
        return result

    def _are_known(self, args: tuple[Any, ...]) -> bool:
        """Whether these are tensors where they were, and otherwise the same values."""
        if len(args) != len(self.args):
            return False
        for arg, known in zip(args, self.args, strict=True):
            if type(arg) is not torch.Tensor if known is TENSOR else type(arg) is not type(known) or arg != known:
                return False
        return True


def learn_rebound(call: Call) -> None:
    """Note attributes of modules that are others than at the beginning of a call."""
    for watch, taken in call.watches:
        rebound = watch.rebound(taken) if watch.has_own else []
        if rebound:
            learn_surprises(call, watch, rebound)


def is_settled(target: Any) -> bool:
    """Whether something that is no module is of the kind that is passed on as it is, for nothing in it may change."""
    kind = type(target)
    if kind is FunctionType:
        return take_function(target) is None
    return kind in ATOMS or (is_ordinary(kind) and not is_mutable(kind))
