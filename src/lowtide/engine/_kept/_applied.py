"""Calls of autograd Functions: found by what stands in for ``forward`` of the class, which ``apply`` looks up each time.

PyTorch's function modes are not told of ``MyFunction.apply``, and from 2.14 on no profiler of Python is. What stands in is an attribute
of the class while regions run that keep such calls, as for modules (``_modules``), and of every class while a run is watched. It is
called with autograd off, inside ``apply``; that saves afterwards what the context was given. So in a replay it returns the results that
were kept, hands the context what the forward handed it, and leaves the rest to ``apply``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import Function

from lowtide.engine._guards._outside import STAND_INS
from lowtide.engine._kept._kept import Holder, Kept
from lowtide.engine._kept._origins import INSIDE, Origin, View, Whole, origin_of, tensors_of
from lowtide.engine._thread import state
from lowtide.engine._tower import tower
from lowtide.engine._tree import tensors_in
from lowtide.errors import InvalidInputError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._finding import Finder

_NOTHING: Any = object()
_lock = threading.RLock()


class Result(int):
    """A saved tensor that is one of those returned: its place among them."""


class Inside(int):
    """A saved tensor that was made inside the call: its place among those."""


class AppliedStandIn:
    """Tells whoever looks on in this thread, and the finder of the region that runs in it, of the call."""

    def __init__(self, function: type[Function]) -> None:
        self._function, self._before = function, function.__dict__.get("forward", _NOTHING)
        self.users = 0
        forward = function.forward
        while type(forward) is AppliedStandIn:  # of a class that this one is derived from: to be told of this call is not its business
            forward = forward.__wrapped__
        self.__wrapped__: Callable[..., Any] = forward
        self.takes_context = function.setup_context is Function.setup_context

    def put(self) -> None:
        """Have it found by ``apply``."""
        self._function.forward = self  # type: ignore[method-assign]

    def take_out(self) -> None:
        """Undo it. What others put over it meanwhile stays, and this one tells nobody any more."""
        if self._function.__dict__.get("forward") is not self:
            return
        if self._before is _NOTHING:
            del self._function.forward
        else:
            self._function.forward = self._before

    def __call__(self, *args: Any) -> Any:
        if not self.users or torch.is_grad_enabled():  # which ``apply`` switches off: somebody calls the function itself
            return self.__wrapped__(*args)
        if not state.recorders or tower.quiet:
            return self._run(args)
        with tower.silence():
            given = tensors_of(args[1:] if self.takes_context else args)
            leaves = [recorder.see_apply(self._function, given) for recorder in state.recorders]
        result = None
        try:
            result = self._run(args)
            return result
        finally:
            with tower.silence():
                for leave in reversed(leaves):
                    leave(result)

    def _run(self, args: tuple[Any, ...]) -> Any:
        finder: Finder | None = state.finder
        if finder is None:
            return self.__wrapped__(*args)
        return finder.applied(self._function, self.__wrapped__, args, self.takes_context)


STAND_INS.add(AppliedStandIn)
_stand_ins: dict[type[Function], AppliedStandIn] = {}
"""Those in use. Classes of Functions are made and forgotten, by compilers and function transforms above all: none is held for longer."""


def all_functions() -> list[type[Function]]:
    """Every class of autograd Functions that there is."""
    found: dict[type[Function], None] = {}
    left: list[type[Function]] = type.__subclasses__(Function)
    while left:
        function = left.pop()
        if function not in found:
            found[function] = None
            left += type.__subclasses__(function)
    return list(found)


def put_applied(functions: Sequence[type[Function]]) -> None:
    """From now on the finder and the onlookers of this thread are told of calls of these Functions."""
    with _lock:
        for function in functions:
            stand_in = _stand_ins.get(function)
            if stand_in is None:
                stand_in = _stand_ins[function] = AppliedStandIn(function)
                stand_in.put()
            stand_in.users += 1


def take_out_applied(functions: Sequence[type[Function]]) -> None:
    """Undo it."""
    with _lock:
        for function in functions:
            stand_in = _stand_ins[function]
            stand_in.users -= 1
            if not stand_in.users:
                del _stand_ins[function]
                stand_in.take_out()


class KeptApplied(Kept):
    """What a replay needs to do without the forward of an autograd Function.

    Attributes:
        saves: for each tensor that the forward had its context save, where that comes from; ``None`` for none.
        marks: which results it marked as not differentiable.
    """

    __slots__ = ("marks", "saves")

    def hold_applied(self, holder: Holder, result: Any, context: Any, given: list[torch.Tensor], versions: list[int]) -> bool:
        """Hold what was returned, and what the context was given that is neither that nor an argument; returns whether it is held."""
        try:
            results = tensors_in(result)
        except InvalidInputError:
            return False
        inside: list[torch.Tensor] = []
        self.saves = [_origin(tensor, results, inside, given, versions) for tensor in (context and context.to_save) or ()]
        marks = [_place(tensor, results) for tensor in (context and context.non_differentiable) or ()]
        self.marks = [mark for mark in marks if mark is not None]
        return None not in marks and self.hold(holder, (result, inside), given)

    def give_again(self, frame: Frame, context: Any, given: list[torch.Tensor], held: dict[int, torch.Tensor]) -> tuple[bool, Any]:
        """Returns whether that can be done, and what the call returned; the context has what it was given."""
        found = [origin.of(given[origin.place]) if type(origin) in (Whole, View) else None for origin in self.saves]  # type: ignore[union-attr]
        if any(type(origin) in (Whole, View) and tensor is None for origin, tensor in zip(self.saves, found, strict=True)):
            return False, None
        result, inside = self.again(held)
        results = tensors_in(result)
        for place, origin in enumerate(self.saves):
            if type(origin) is Result:
                found[place] = results[origin]
            elif type(origin) is Inside:
                found[place] = inside[origin]
            elif type(origin) is int:
                found[place] = given[origin]
        if found:
            context.save_for_backward(*found)
        if self.marks:
            context.mark_non_differentiable(*[results[mark] for mark in self.marks])
        return True, result


def _place(tensor: torch.Tensor, among: list[torch.Tensor]) -> int | None:
    return next((place for place, other in enumerate(among) if other is tensor), None)


def _origin(
    tensor: Any, results: list[torch.Tensor], inside: list[torch.Tensor], given: list[torch.Tensor], versions: list[int]
) -> Origin | Result | Inside:
    if tensor is None:
        return None
    place = _place(tensor, results)
    if place is not None:
        return Result(place)
    origin = origin_of(tensor, given, versions)
    if origin is not INSIDE:
        return origin
    inside.append(tensor)
    return Inside(len(inside) - 1)
