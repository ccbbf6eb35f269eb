"""Calls of torch functions that a module makes in its forward, as members of regions: a pooling between two blocks, a concatenation.

They are found by counting: a function mode is in force while the module's own forward runs, and the n-th call of a function is the member.
Inside the call the mode is not in force, so that functions that it calls are part of it. Should the count ever lead to another call, that
one is replayed: memory would be saved elsewhere, gradients are the same.

A call that the count finds is a member only where the module's own forward makes it: not in a module inside, nor in what is run under
saved-tensor hooks of its own (a region, ``torch.utils.checkpoint``, offloading). Those may be run again by themselves, where nobody counts:
what was a region inside in forward would not be one then.

The mode is put in force and taken out around the forward of the module, so that nothing is left of it whichever way that ends. What was
called by then of a region waits there for the next member.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide import _torch_private as private
from lowtide.engine._kept._between import Between
from lowtide.engine._observers import switch
from lowtide.engine._profile import Profile
from lowtide.records import CallSite

if TYPE_CHECKING:
    from lowtide.engine._install import Segment

_MOST_FUNCTIONS = 1000
Places = dict[str, dict[int, list[tuple["Segment", int]]]]


@dataclass(frozen=True, slots=True)
class FunctionMember:
    """A call of a torch function in the forward of a module.

    Attributes:
        caller: the module.
        function: qualified name, ``torch.nn.functional.relu``.
        index: calls of the same function before it in the call of the module, those in modules inside included. Where that many lead into
            a module inside, there is no member.
    """

    caller: nn.Module
    function: str
    index: int


class MemberCall:
    """Calls a function, or a region inside on the same call, as a member of a region.

    Args:
        segment: what it shares with the other members.
        member: its place among them.
        target: what to call.
    """

    def __init__(self, segment: Segment, member: int, target: Callable[..., Any]) -> None:
        self._segment, self._member, self._target = segment, member, target
        self._profile = Profile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._segment.enabled or switch.off:
            return self._target(*args, **kwargs)
        return self._segment.run(self._member, self._target, None, args, kwargs, self._profile)


class ListeningForward:
    """Stands in for ``module.forward`` where calls that it makes are members of regions.

    Attributes:
        before: what it stands in for, where that is not the method of the class.
    """

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None, places: Places | None = None) -> None:
        self._module = weakref.ref(module)
        self.before = before
        self._places: Places = {} if places is None else places
        self._members: dict[Any, tuple[str, dict[int, MemberCall]] | None] = {}

    def add(self, function: str, index: int, segment: Segment, member: int) -> None:
        """Have a call be a member, around the regions that it is in already."""
        self._places.setdefault(function, {}).setdefault(index, []).append((segment, member))
        self._members = {}

    def drop(self, segment: Segment) -> None:
        """Leave out the members of a region."""
        for indices in self._places.values():
            for index, around in list(indices.items()):
                indices[index] = [entry for entry in around if entry[0] is not segment]
                if not indices[index]:
                    del indices[index]
        self._places = {function: indices for function, indices in self._places.items() if indices}
        self._members = {}

    @property
    def is_idle(self) -> bool:
        """Whether there are no members any more."""
        return not self._places

    def members_of(self, function: Any) -> tuple[str, dict[int, MemberCall]] | None:
        """The name of a function, by which calls are counted, and by number those that are members; ``None`` where there are none."""
        if function not in self._members:
            if len(self._members) > _MOST_FUNCTIONS:  # code that makes functions anew for every step
                self._members.clear()
            name = CallSite(function, "function").function_name
            members = {index: _nested(around, function) for index, around in self._places.get(name, {}).items()}
            self._members[function] = (name, members) if members else None
        return self._members[function]

    def _target(self) -> Callable[..., Any]:
        module = self._module()
        assert module is not None
        return self.before or type(module).forward.__get__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or torch_compiler.current() is not None:
            # The compiler cannot look through the mode: members that are modules are regions there. Nor can torch 2.11's make a method.
            module = self._module()
            assert module is not None
            return type(module).forward(module, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = self._target()
        if switch.off or not torch.is_grad_enabled():
            return target(*args, **kwargs)
        private.push_function_mode(_Counting(self))
        try:
            return target(*args, **kwargs)
        finally:
            private.pop_function_mode()
            for segment in {segment for indices in self._places.values() for around in indices.values() for segment, _ in around}:
                segment.stop_waiting()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """What ``inspect.signature`` reads."""
        return self._target()

    def __deepcopy__(self, memo: dict[int, Any]) -> ListeningForward:
        import copy

        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        return ListeningForward(module, copy.deepcopy(self.before, memo), copy.deepcopy(self._places, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return ListeningForward, (self._module(), self.before, self._places)


class _Counting(Between):
    """Counts the calls of functions in one run of a module's forward, and has members called as such."""

    def __init__(self, forward: ListeningForward) -> None:
        super().__init__()
        self._forward, self._hooks = forward, private.top_hooks()
        self._members_of, self._counts = forward.members_of, {}  # type: Callable[[Any], Any], dict[str, int]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._members_of(func)
        if known is None:
            return func(*args, **kwargs)
        name, members = known
        index = self._counts.get(name, 0)
        self._counts[name] = index + 1
        member = members.get(index)
        return func(*args, **kwargs) if member is None or not self._is_own_call() else member(*args, **kwargs)

    def _is_own_call(self) -> bool:
        """Whether the forward makes the call that is under way itself, so that whatever runs that again counts again."""
        if torch.compiler.is_compiling() or not _same_hooks(private.top_hooks(), self._hooks):
            return False
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not private.MODULE_CALL:
            if frame.f_code is _RUN:
                return frame.f_locals["self"] is self._forward
            frame = frame.f_back  # type: ignore[assignment]
        return False


_RUN = ListeningForward._run.__code__


def _same_hooks(one: tuple[Any, Any] | None, other: tuple[Any, Any] | None) -> bool:
    """Whether what autograd saves goes through the same hooks."""
    return one is other if one is None or other is None else one[0] is other[0] and one[1] is other[1]


def _nested(around: list[tuple[Segment, int]], function: Any) -> MemberCall:
    """The call as a member of several regions, the innermost first."""
    call: Any = function
    for segment, member in around:
        call = MemberCall(segment, member, call)
    return call  # type: ignore[no-any-return]


def listen(member: FunctionMember, segment: Segment, place: int) -> None:
    """Have a call be a member of a region."""
    own = member.caller.__dict__
    if not isinstance(own.get("forward"), ListeningForward):
        own["forward"] = ListeningForward(member.caller, own.get("forward"))
    own["forward"].add(member.function, member.index, segment, place)


def stop_listening(caller: nn.Module, segment: Segment) -> None:
    """Leave a region's members out; without any left the module has its forward back."""
    forward = caller.__dict__.get("forward")
    if not isinstance(forward, ListeningForward):
        return
    forward.drop(segment)
    if forward.is_idle:
        del caller.__dict__["forward"]
        if forward.before is not None:
            caller.__dict__["forward"] = forward.before
