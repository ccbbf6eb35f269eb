"""Regions installed on modules, in place.

What is installed is an attribute ``forward`` of the module *instance*; it hides the method of the class, so the module's
hooks, name, type and ``state_dict`` stay what they were. It refers to its module weakly, for a cycle would keep the memory
of a dropped model until the garbage collector comes by. Copies and pickles of the model get regions of their own, bound to
the copy.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide.engine._calls_in_graph import InGraph
from lowtide.engine._frame import Frame
from lowtide.engine._function_members import FunctionMember, ListeningForward, listen, stop_listening
from lowtide.engine._observers import switch
from lowtide.engine._options import Options, Policy
from lowtide.engine._profile import Profile, profile_of
from lowtide.engine._region import Region
from lowtide.engine._thread import hooks_work, state
from lowtide.engine._tree import tensors_in
from lowtide.errors import AlreadyAppliedError, InvalidInputError


class _Open(threading.local):
    """The frame that the next member may join, and which member that is. Weakly: without slots there is nothing to join.

    A function that saves nothing (a concatenation) has no slots, and is joined all the same: its frame is held until the module that
    calls it is through. Inside another region, whose replay asks for no slots here, a frame without any is joined in the forward too, or
    the hooks around would be handed one input more there: it is held by what the member returned, without which nobody joins.
    """

    frame: weakref.ref[Frame] | None = None
    held: Frame | None = None
    by_results: Sequence[weakref.ref[torch.Tensor]] = ()
    member = 0


class Segment:
    """What the members of a region share.

    Attributes:
        region: name, options and counters.
        length: how many members it has.
        calls_functions: calls of functions are among them.
        enabled: when false, the members run as if nothing was installed.
    """

    def __init__(self, region: Region, length: int, calls_functions: bool = False) -> None:
        self.region = region
        self.length = length
        self.calls_functions = calls_functions
        self.enabled = True
        self._open = _Open()

    def __deepcopy__(self, memo: dict[int, Any]) -> Segment:
        return Segment(Region(self.region.name, self.region.options), self.length, self.calls_functions)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_segment, (self.region.name, self.region.options, self.length, self.calls_functions)

    def run(
        self,
        member: int,
        target: Callable[..., Any],
        module: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        profile: Profile | None = None,
    ) -> Any:
        """Call one member: in the frame of the members before it where they ran just now, else in one of its own.

        Args:
            member: its place.
            target: what to call.
            module: whose forward it is; ``None`` for a function.
            args, kwargs: its arguments.
            profile: what is known of a function.
        """
        region = self.region
        if profile is None:
            # A region around another on the same module sees that one's inputs alone: what is known of it is of its own.
            profile = profile_of(target if isinstance(target, InstalledForward) else module)
        if self.length == 1 or not hooks_work():
            return region.run(target, module, profile, args, kwargs)
        frame = self._take_frame(member, args, kwargs)
        if frame is None:
            frame = Frame(region)
            frame.joinable = True
        before = len(frame.calls)
        if state.depth and not state.keeps:
            result = region.run_in_replay(frame, target, module, profile, args, kwargs)
            entered = True
        else:
            result = region.run_member(frame, target, module, profile, args, kwargs)
            entered = len(frame.calls) > before
        if entered and member + 1 < self.length:
            frame.remember_results(result)
            self._open.frame, self._open.member = weakref.ref(frame), member + 1
            self._open.held = frame if self.calls_functions else None
            self._open.by_results = _held_by(result, frame) if frame.nested and not state.depth else ()
            if state.depth:
                state.joined[id(self)] = frame
        else:
            frame.close()
            if state.depth:
                state.joined.pop(id(self), None)
        return result

    def _take_frame(self, member: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Frame | None:
        """The open frame, if this member is the one it waits for and is given what the members before it made."""
        waiting = self._open
        frame = waiting.frame() if waiting.frame is not None else None
        waiting.frame = waiting.held = None
        waiting.by_results = ()
        if frame is None or waiting.member != member:
            return None
        return frame if (frame.joins(args) or frame.joins(tensors_in((args, kwargs)))) and frame.follow() else None

    def stop_waiting(self) -> None:
        """A module that calls members is through: without slots there is nothing to join any more."""
        self._open.held = None


def _held_by(result: Any, frame: Frame) -> list[weakref.ref[torch.Tensor]]:
    """References that hold a frame as long as one of these tensors lives: Python lets go of what is called once the tensor is gone."""
    return [weakref.ref(tensor, functools.partial(_is_gone, frame)) for tensor in tensors_in(result)]


def _is_gone(_: Frame, __: weakref.ref[torch.Tensor]) -> None:
    """A result is gone: nothing is to be done, see ``_held_by``."""


def _make_segment(name: str, options: Options, length: int, calls_functions: bool) -> Segment:
    return Segment(Region(name, options), length, calls_functions)


class InstalledForward:
    """Stands in for ``module.forward``.

    Attributes:
        segment: what it shares with the other members.
        member: its place among them.
        path: of the module in the model.
    """

    def __init__(self, module: nn.Module, segment: Segment, member: int, before: Callable[..., Any] | None, path: str = "") -> None:
        self._module = weakref.ref(module)
        self.segment = segment
        self.member = member
        self.before = before
        self.path = path
        # In a graph nobody listens to calls of functions: each module is by itself there.
        place = (0, 1) if segment.calls_functions else (member, segment.length)
        self._in_graph = InGraph(segment.region, self._module, *place)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None
        if not torch.is_grad_enabled() or not self.segment.enabled or switch.off:
            return type(module).forward(module, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)
        if torch.compiler.is_compiling() or torch_compiler.current() is not None:
            if self._in_graph.broken:  # asked here: of what is looked at further inside before a break, the compiler remembers nothing
                torch_compiler.break_graph()
            return self._run_under_compiler(args, kwargs)
        target: Callable[..., Any] = self.before or type(module).forward.__get__(module)
        return self.segment.run(self.member, target, module, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self._module()
        assert module is not None
        return self.segment.run(self.member, self.before or type(module).forward.__get__(module), module, args, kwargs)

    def _run_under_compiler(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from lowtide.engine._compiled import run_under_compiler

        module = self._module()
        assert module is not None
        target = self.before or functools.partial(type(module).forward, module)
        return run_under_compiler(self._in_graph, self._run, target, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What ``inspect.signature`` reads."""
        module = self._module()
        assert module is not None
        return self.before or type(module).forward.__get__(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> InstalledForward:
        import copy

        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        return InstalledForward(module, copy.deepcopy(self.segment, memo), self.member, copy.deepcopy(self.before, memo), self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return InstalledForward, (self._module(), self.segment, self.member, self.before, self.path)


class RegionHandle:
    """A region that was installed on modules.

    Attributes:
        name: module path, or first and last path of a segment.
        enabled: set it to false and the modules run as if nothing was installed.
    """

    def __init__(self, modules: Sequence[nn.Module], segment: Segment, callers: Sequence[nn.Module] = ()) -> None:
        self._modules = [weakref.ref(module) for module in modules]
        self._callers = [weakref.ref(module) for module in callers]
        self._segment = segment

    @property
    def name(self) -> str:
        """Module path, or first and last path of a segment."""
        return self._segment.region.name

    @property
    def enabled(self) -> bool:
        """Whether the region is in force."""
        return self._segment.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._segment.enabled = value

    def modules(self) -> list[nn.Module]:
        """The members that are modules and still there."""
        return [module for module in (ref() for ref in self._modules) if module is not None]

    @property
    def region(self) -> Region:
        """What all calls of the region share."""
        return self._segment.region

    def replay_seconds(self) -> float:
        """Seconds spent in replays of this region since it was installed."""
        return self._segment.region.replay_s

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the modules run as if nothing was installed."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def remove(self) -> None:
        """Put the modules back as they were. Doing it again does nothing."""
        for ref in self._modules:
            module = ref()
            installed = None if module is None else module.__dict__.get("forward")
            if module is not None and isinstance(installed, InstalledForward) and installed.segment is self._segment:
                del module.__dict__["forward"]
                if installed.before is not None:
                    module.__dict__["forward"] = installed.before
        for ref in self._callers:
            module = ref()
            if module is not None:
                stop_listening(module, self._segment)


def install(
    modules: Sequence[tuple[str, nn.Module | FunctionMember]],
    options: Options | None = None,
    *,
    policy: Policy | None = None,
    around: bool = False,
) -> RegionHandle:
    """Make a module, or consecutive siblings as one segment, a region, in place.

    Args:
        modules: path and module of each member, in the order in which the parent calls them; in place of a module, a call of a function.
        options: see ``Options``.
        policy: what is kept inside the region; takes the place of the one in ``options``.
        around: regions that are installed on some of them already are inside this one. They are to be removed after it.

    Returns:
        A handle; ``handle.remove()`` puts everything back.

    Raises:
        InvalidInputError: no modules, or one module twice.
        AlreadyAppliedError: a region is installed on one of them already, and this one is not to be around it; nothing was changed.
    """
    chosen = options or Options()
    chosen = chosen if policy is None else replace(chosen, policy=policy)
    if chosen.policy is not None:
        modules = [_uncompiled(path, module) for path, module in modules]
    members = [module if isinstance(module, FunctionMember) else id(module) for _, module in modules]
    if not members or len(set(members)) != len(members):
        raise InvalidInputError("a region needs one module or several different ones: pass [(path, module), ...]")
    if not around:
        refuse_installed((path, module) for path, module in modules if isinstance(module, nn.Module))
    name = modules[0][0] if len(modules) == 1 else f"{modules[0][0]} … {modules[-1][0]}"
    callers = [module.caller for _, module in modules if isinstance(module, FunctionMember)]
    segment = Segment(Region(name, chosen), len(members), bool(callers))
    for index, (path, module) in enumerate(modules):
        if isinstance(module, FunctionMember):
            listen(module, segment, index)
        else:
            module.__dict__["forward"] = InstalledForward(module, segment, index, module.__dict__.get("forward"), path)
    return RegionHandle([module for _, module in modules if isinstance(module, nn.Module)], segment, callers)


def _uncompiled(path: str, module: nn.Module | FunctionMember) -> tuple[str, nn.Module | FunctionMember]:
    """The module that a compiled one is made of: what decides about calls in it has to be compiled with it, to see them."""
    apart = torch_compiler.taken_apart(module)
    inner = None if apart is None else apart[1]
    return _uncompiled(f"{path}._orig_mod", inner) if isinstance(inner, nn.Module) else (path, module)


def refuse_installed(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make sure that no region is installed on any of these modules.

    Raises:
        AlreadyAppliedError: one is.
    """
    for path, module in modules:
        if isinstance(module.__dict__.get("forward"), InstalledForward | ListeningForward):
            raise AlreadyAppliedError(f"a region is installed on {path!r} already: call remove() on its handle first")
