"""One member call of a frame: the callable, its arguments taken apart, and the state that it ran in."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._functions import parameter_names
from lowtide.engine._guards._ambient import Ambient, for_replay, is_in_force, set_ambient, take_ambient
from lowtide.engine._guards._attributes import (
    AttributeKeeper,
    Attributes,
    SlotTable,
    put_attributes,
    put_objects,
    set_attributes,
    take_attributes,
    take_changed,
)
from lowtide.engine._guards._memory import copy_before_write
from lowtide.engine._guards._modules import Taken, Watch, watch_of
from lowtide.engine._guards._outside import Read, changed, put_back_outside, put_outside
from lowtide.engine._guards._random import NUMPY, PYTHON, Random, cpu_moved, put_random, take_random
from lowtide.engine._guards._uses import checked
from lowtide.engine._own import own_attribute
from lowtide.engine._parts import Box, Held, Made, Place
from lowtide.engine._profile import Profile, Script
from lowtide.engine._state import has_state, put_state, take_state
from lowtide.engine._thread import Mismatch, is_replaying, state
from lowtide.engine._tower import uncompiled
from lowtide.engine._tree import ATOMS, load, places_in, store, store_object
from lowtide.errors import InvalidInputError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._guards._reach import Outside
    from lowtide.engine._kept._keeping import Keeping
    from lowtide.engine._slot import Slot


_CALLED, _TELLING = frozenset({FunctionType, Box}), frozenset({bool, str, type(None), type, FunctionType, Box})


class NotInitializedError(Exception):
    """A module has parameters that its first call will make. That call is left alone: there is nothing yet to go back to."""


class Call:
    """How to call a member again.

    Attributes:
        target: the callable, taken apart unless it is ``fixed``.
        args, kwargs: the arguments, taken apart.
        profile: what audits learned of the callable.
        watches: the modules that it may run, with what they held.
        states: generators and the like, with their state.
        objects: attributes of ordinary objects that it can reach: their dictionary, and the values in it.
        met: objects that it can reach; until it is over.
        news: it can reach an object of a type that no watched call could reach.
        attributes: of modules, that such a call changes, with what they were.
        outside: what its code reads from elsewhere, as it was.
        passing: nothing of it is kept but its inputs.
        audited: it is watched op by op.
        draws: it drew from a generator of torch, or may have.
        ended_at: the number of the first backward node made after it.
        first: how many tensors the frame had saved when it was entered.
        random_end: state of the CPU generator at the end, where another thread may have drawn from it meanwhile.
        kept: the calls in it whose results are kept.
        script: of an audited call that went the same way, once it is known.
        trained: of each module that is watched, which of its tensors required gradients; of calls without a script.
    """

    __slots__ = (
        "_keep", "ambient", "args", "attributes", "audited", "deep", "draws", "ended_at", "first", "fixed", "kept", "kwargs", "met", "news",
        "objects", "outside", "passing", "profile", "python_state", "random", "random_end", "script", "states", "target", "trained",
        "watches",
    )  # fmt: skip

    def __init__(
        self,
        frame: Frame,
        target: Callable[..., Any],
        fixed: nn.Module | None,
        profile: Profile,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        passing: bool = False,
    ) -> None:
        self.profile = profile
        self.watches: list[tuple[Watch, Taken]] = []
        self.states: list[tuple[object, Any]] = []
        self.objects: list[tuple[Any, list[Any]]] = []
        self.news = False
        self.python_state = frame.region.options.python_state
        self.attributes: list[Attributes] = []
        self.outside: list[Read] = []
        self.first = len(frame.slots)
        self.script: Script | None = None
        self.trained: tuple[tuple[bool, ...], ...] = ()
        self.kept: Keeping | None = None
        self.fixed = fixed is not None
        self.deep = False
        self.audited = False
        self.ended_at = 0
        self._keep: Callable[[torch.Tensor], Place] | None = frame.keep
        self.met: list[object] = []
        self.passing = passing
        self._take(target, fixed, args, kwargs)
        if passing:
            return
        outside = profile.outside
        if outside:
            self.outside = outside.take(self.module, self.met)
            self.news = self.news or not profile.has_met(self.met)
            for _, value, _ in self.outside[len(outside.places) :]:  # of what is in known places the states are taken below
                if has_state(type(value)):
                    self.state(value)
        if outside.stateful or outside.environment:
            self.take_states(outside)
        if profile.python_random:
            self.state(PYTHON)
        if profile.numpy_random:
            self.state(NUMPY)
        self.random: Random = take_random()
        self.draws = True
        self.random_end: bytes | None = None
        self.ambient: Ambient = take_ambient(profile.attention)
        self._keep = None

    def _take(self, target: Callable[..., Any], fixed: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        memo: dict[int, Any] = {}
        keep = self._keep
        assert keep is not None
        self.target: Any = target
        if fixed is not None and not self.passing:
            watch = self.profile.watch
            if watch is None or watch.is_stale():
                watch = self.profile.watch = watch_of(fixed)
            self._watch(watch)
        elif fixed is None:
            stored_target = store(target, self, memo)
            if is_replaying():
                self.fixed = True
            else:
                self.target = stored_target
        stored: list[Any] = []
        try:
            for arg in args:
                kind = type(arg)
                stored.append(keep(arg) if kind is torch.Tensor else arg if kind in ATOMS else store(arg, self, memo))
            self.args = stored
            self.kwargs = {}
            for name, arg in kwargs.items():
                self.kwargs[name] = store(arg, self, memo)
        except InvalidInputError as error:
            here = ([*parameter_names(target, len(args)), *kwargs])[len(stored) + len(getattr(self, "kwargs", ()))]
            raise InvalidInputError(f"argument {here!r}: {error}") from None

    def take_deep(self, frame: Frame, memo: dict[int, Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the arguments apart again, this time down to the attributes of ordinary objects."""
        self._keep, self.deep = frame.keep_directly, True
        if not self.fixed:
            self.target = store(target, self, memo)
        self.args = [store(arg, self, memo) for arg in args]
        self.kwargs = {name: store(arg, self, memo) for name, arg in kwargs.items()}
        self._keep, self.deep = None, False

    def tensor(self, tensor: torch.Tensor) -> Place:
        """Hold a tensor that was met in the arguments."""
        assert self._keep is not None
        return self._keep(tensor)

    def module(self, module: nn.Module) -> None:
        """Watch a module that was met, or that is called."""
        if self.passing:
            return
        watch = watch_of(module)
        if not any(watch is known for known, _ in self.watches):
            self._watch(watch)

    def _watch(self, watch: Watch) -> None:
        if watch.lazy:
            raise NotInitializedError
        self.watches.append((watch, watch.take()))
        for value in watch.states:
            self.state(value)
        if watch.containers and self.python_state:
            keeper = AttributeKeeper(other=self._meet, module=self.module)
            self.attributes += take_attributes(watch.containers, keeper)
            for value in keeper.states:
                self.state(value)
        if watch.changed:
            self.attributes += take_changed(watch.changed, watch.overwritten)
        self.met += self.watches[-1][1][3]

    def state(self, value: object) -> None:
        """Take the state of a generator, or of what is registered."""
        if not self.passing and all(value is not known for known, _ in self.states):
            self.states.append((value, take_state(value)))

    def take_states(self, outside: Outside) -> None:
        """Take the states of what is reached elsewhere."""
        for value in outside.states():
            self.state(value)
        if outside.environment:
            self.state(os.environ)

    def other(self, value: object) -> None:
        """Note what the attributes of an ordinary object are: they may be others by the time of the replay."""
        self.news = self.news or not self.profile.has_met([value])
        self._meet(value)

    def _meet(self, value: object) -> None:
        self.met.append(value)
        self.note_object(value)

    def note_object(self, value: object) -> None:
        """Note what its attributes are."""
        own: Any = own_attribute(value, "__dict__") or SlotTable.of(value)
        if own and self.python_state:
            self.objects.append((own, list(own.values())))

    def instance(self, value: Any, since: int | None, memo: dict[int, Any]) -> Any:
        """Take an object apart. A region around is handed its tensors only if its replay will know as well that they have to be."""
        if since is None or since <= state.since or state.since < 0:
            return store_object(value, self, memo)
        if self.passing:
            return value
        keep: Any = self._keep
        self._keep = keep.__self__.keep_directly
        try:
            return store_object(value, self, memo)
        finally:
            self._keep = keep

    def forget_own_changes(self) -> None:
        """Leave alone what the call itself changed elsewhere: its replays are to change it again."""
        own = {id(place) for place, _, _ in changed(self.outside)}
        self.outside = [entry for entry in self.outside if id(entry[0]) not in own]

    def arguments(self, frame: Frame, results: list[list[torch.Tensor | None]]) -> tuple[Any, list[Any], dict[str, Any]]:
        """Callable and arguments as they were; containers are new ones."""
        if self.fixed and not self.kwargs and len(self.args) == 1 and type(self.args[0]) is Held:
            return self.target, [frame.fetch(self.args[0])], {}
        memo: dict[int, Any] = {}
        fetched: dict[int, torch.Tensor] = {}

        def fetch(place: Place) -> torch.Tensor:
            if isinstance(place, Held):
                # One that was passed twice stays one: attention modules ask whether their query is their key.
                tensor = fetched.get(place.index)
                if tensor is None:
                    tensor = fetched[place.index] = frame.fetch(place)
                return tensor
            assert isinstance(place, Made)
            made = results[place.call][place.leaf]
            assert made is not None, "a result is let go of only after the last member that takes it"
            return made

        target = self.target if self.fixed else load(self.target, fetch, memo)
        args = [load(stored, fetch, memo) for stored in self.args]
        kwargs = {name: load(stored, fetch, memo) for name, stored in self.kwargs.items()} if self.kwargs else {}
        return target, args, kwargs

    def replay(self, frame: Frame, wanted: Slot) -> bool:
        """Fill the wanted slot, and what else autograd may ask for, in a shorter way than that of any call, if there is one.

        Returns:
            False if there is none; no slot is filled then.
        """
        return False

    def run(self, region: str, target: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:  # noqa: C901 – one straight line, for every replay pays it
        """Call it again in the state in which it ran; afterwards everything is as it was before.

        Raises:
            InputChangedError: a parameter or buffer that it used was modified since.
        """
        target, check = self._checked(target)
        undo = []
        moved: Any = ()
        now: Any = ()
        outside: Any = []
        attributes = random = None
        elsewhere = not is_in_force(self.ambient)
        if elsewhere:
            ambient = take_ambient(len(self.ambient[5]) > 0, whole=True)
            wanted = for_replay(self.ambient, ambient)
        entered = False
        grad = torch.is_grad_enabled()
        try:  # from here on memory may run out, for copies are made
            for watch, taken in self.watches:
                there = watch.put(taken, attributes=self.python_state)
                if there is not None:
                    undo.append((watch, there))
            moved = put_objects(self.objects) if self.objects else ()
            now = [(value, take_state(value)) for value, _ in self.states] if self.states else ()
            for value, then in self.states:
                put_state(value, then)
            attributes = put_attributes(self.attributes) if self.attributes else None
            outside = put_outside(self.outside) if self.outside else []
            random = self._random_as_then() if self.draws else None
            private.set_grad_enabled(True)
            if elsewhere:
                entered = True
                set_ambient(wanted, ambient)
            result = self.ambient[0].copy().run(target, *args, **kwargs)
            if self.random_end is not None and cpu_moved(self.random_end):
                raise Mismatch(-1, None)
            return result
        finally:
            if random is not None:
                put_random(random)
            if entered:
                set_ambient(ambient, wanted)
            private.set_grad_enabled(grad)
            put_back_outside(outside)
            if attributes is not None:
                set_attributes(attributes)
            for own, before in moved:
                own.update(before)
            for value, before_replay in now:
                put_state(value, before_replay)
            for watch, there in reversed(undo):  # one may be part of another
                watch.put_back(there)
            check(region)

    def about_to_write(self, key: int) -> None:
        """An audit around it sees that a tensor is about to be written to, while it runs: hold those of its modules as they are."""
        for _, taken in self.watches:
            copy_before_write(taken[0], taken[1], key)

    def learn_written(self) -> None:
        """Something was modified since the forward: if it was the call itself that wrote to it, the next one shows that."""
        self.profile.left = 0
        for watch, taken in self.watches:
            watch.learn_written(taken)

    def _random_as_then(self) -> Random:
        """Set the generators back to what they were; returns what they are now."""
        now = take_random()
        put_random(self.random)
        return now

    def _checked(self, target: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[[str], None]]:
        """What a replay runs, and what is called with the region's name afterwards: it raises if what the replay used had been modified."""
        return checked(self.watches, self.attributes, self.outside, target) or (_watched(target) if self.audited else target, _all_is_well)

    def flags(self) -> tuple[Any, ...]:
        """What among the arguments and closure variables says how to go rather than with what: calls that differ in it differ in kind."""
        given = self._given()
        return tuple(_telling(value) for value in given if type(value) in _TELLING)

    def way(self) -> tuple[int, ...] | None:
        """Of a function: its code and the numbers that it was given, which may say which of the modules in its reach it runs."""
        return None if self.fixed else (id(self.profile), *(value for value in self._given() if type(value) is int))

    def _given(self) -> list[Any]:
        """Arguments and closure variables."""
        return [*self.args, *self.kwargs.values(), *(self.target.parts if type(self.target) is Box else ())]

    def names_of(self, place: Place) -> list[str]:
        """What the user calls an argument: ``x``, ``batch['mask']``."""
        names = parameter_names(self.target, len(self.args))
        stored = [*zip(names, self.args, strict=True), *self.kwargs.items(), ("closure", self.target)]
        return [path for name, part in stored for path, found in places_in(part, name) if found is place]


def _telling(value: Any) -> Any:
    """What stands for a value that says how to go, and keeps no class alive."""
    if type(value) in _CALLED:
        return _code_of(value)
    return weakref.ref(value) if type(value) is type else value


def _code_of(value: Any) -> CodeType | None:
    code: CodeType | None = value.code if type(value) is Box else value.__code__
    return code


def _all_is_well(region: str) -> None:
    """Nothing was modified."""


def _watched(target: Any) -> Any:
    """The callable as an audited forward ran it: compiled code is not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with uncompiled():
            return target(*args, **kwargs)

    return call
