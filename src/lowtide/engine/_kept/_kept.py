"""One kept call: what is held of it between its forward and its replay."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._guards._random import Random, put_random, take_random
from lowtide.engine._kept._origins import ELSEWHERE, Known, Origin, View, Whole
from lowtide.engine._parts import Place
from lowtide.engine._state import put_state, take_state
from lowtide.engine._tree import load, store, store_object, tensors_in
from lowtide.errors import InputChangedError, InvalidInputError

if TYPE_CHECKING:
    from torch import nn

    from lowtide.engine._frame import Frame

_NOTHING = torch.empty(0)
NO_RESULT: Any = object()
"""In place of what a call returned that nobody will ask for: what it saved is all that a replay needs, and its end."""
_kind_of: Callable[[torch.Tensor], tuple[torch.Size, bool]] = attrgetter("shape", "requires_grad")


def kinds_of(given: list[torch.Tensor]) -> list[Any]:
    """What a call shows by what it is given, so that another one is not taken for it."""
    return [torch.is_grad_enabled(), *map(_kind_of, given)]


class Around(int):
    """A tensor made inside the call that the hooks around the region hold: its place in ``Frame.held``."""


class Result(Place):
    """A tensor among the results.

    Attributes:
        index: its place in ``Frame.held``.
        requires_grad: of the result.
        version: of the result when it was returned; ``None`` where what is held is out of reach of those who write to it.
        copied: the replay may write to it.
        counter: counts writes to the result where the hooks around the region hold it: a replay of the region around may make it anew, and
            end before it is written to.
    """

    __slots__ = ("copied", "counter", "index", "requires_grad", "version")

    def __init__(self, index: int, requires_grad: bool, version: int | None, copied: bool, counter: torch.Tensor | None = None) -> None:
        self.index, self.requires_grad, self.version, self.copied, self.counter = index, requires_grad, version, copied, counter


class After:
    """Where a kept call left what is no tensor.

    Attributes:
        calls: of a module, how often each function had been called when it returned.
        place: how many marks had been passed then.
        random: the random generators; ``None`` in a region that does not draw.
        states: other generators.
    """

    __slots__ = ("calls", "place", "random", "states")

    def __init__(self, calls: dict[Any, int] | None, place: int, states: list[object] | None) -> None:
        self.calls, self.place = calls, place
        self.random: Random | None = None if states is None else take_random()
        self.states = [(value, take_state(value)) for value in states or ()]

    def put(self) -> None:
        """Have the generators there again."""
        if self.random is not None:
            put_random(self.random)
        for value, state in self.states:
            put_state(value, state)


class Kept:
    """What a replay needs to do without the call.

    Attributes:
        first: how many tensors the frame had saved when the call was entered.
        kinds: of the tensors that it was given, see ``kinds_of``.
        origins: for each tensor that autograd saved in it, where that comes from.
        result: what it returned, taken apart.
        results: the tensors in that.
        after: where it left what is no tensor; ``None`` if it moved nothing.
    """

    __slots__ = ("after", "first", "kinds", "origins", "result", "results")

    def __init__(self, first: int, kinds: list[Any]) -> None:
        self.first = first
        self.kinds = kinds
        self.origins: list[Origin | Around] = []
        self.after: After | None = None
        self.result: Any = None
        self.results: tuple[Result, ...] = ()

    def hold(self, holder: Holder, result: Any, given: list[torch.Tensor]) -> bool:
        """Hold what was returned, unless a part of it shares memory with an argument; returns whether it is held."""
        try:
            tensors = tensors_in(result)
        except InvalidInputError:
            return False
        if not all(is_own(tensor, given) for tensor in tensors):
            return False
        self.result = store(result, holder, {})
        self.results = tuple(holder.results.values())
        return True

    def held(self, frame: Frame) -> dict[int, torch.Tensor] | None:
        """What is held, by its place in ``Frame.held``; ``None`` if a result was written to or let go of: the call has to be run."""
        if frame.packs_kept:
            return self._held_around(frame)
        found: dict[int, torch.Tensor] = {}
        for result in self.results:
            tensor = frame.held[result.index]
            if tensor is None or (result.version is not None and tensor._version != result.version):
                return None
            found[result.index] = tensor
        return found

    def _held_around(self, frame: Frame) -> dict[int, torch.Tensor] | None:
        indices = [*(result.index for result in self.results), *(origin for origin in self.origins if type(origin) is Around)]
        if any(frame.held[index] is None for index in indices):
            return None
        if any(result.counter is not None and result.counter._version != result.version for result in self.results):
            return None
        try:
            return {index: frame.unpack_held(frame.held[index]) for index in indices}
        except InputChangedError:  # written to in the replay of the region around, as it was in the forward
            return None

    def saved_again(self, frame: Frame, given: list[torch.Tensor], held: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        """What the call would save, in order, made from these arguments; ``None`` if that cannot be.

        Places that nobody asks a replay for are filled with an empty tensor.
        """
        saved: list[torch.Tensor] = []
        place = self.first
        for origin in self.origins:
            kind = type(origin)
            if origin is ELSEWHERE:
                found: torch.Tensor | None = _NOTHING
            elif kind is Whole or kind is View:
                found = origin.of(given[origin.place])  # type: ignore[union-attr]
            elif kind is int:
                found = given[origin]  # type: ignore[index]
            elif kind is Around:
                found = held[origin]  # type: ignore[index]
            elif kind is Known:
                found = origin.tensor  # type: ignore[union-attr]
            else:
                found = _NOTHING if self._is_there(frame, place) else None
            if found is None:
                return None
            saved.append(found)
            place += 1
        return saved

    @staticmethod
    def _is_there(frame: Frame, index: int) -> bool:
        """Whether nobody needs what was saved inside the call from a replay: the slot has it still, or nobody has the slot."""
        ref = frame.slots[index]
        slot = None if ref is None else ref()
        return slot is None or slot.value is not None

    def release(self, frame: Frame) -> None:
        """Let go of what is held."""
        for result in self.results:
            frame.held[result.index] = None
        if frame.packs_kept:
            for origin in self.origins:
                if type(origin) is Around:
                    frame.held[origin] = None

    def again(self, held: dict[int, torch.Tensor]) -> Any:
        """What the call returned; the generators are where it left them."""
        if self.after is not None:
            self.after.put()
        if type(self.result) is Result:
            return _as_result(held[self.result.index], self.result)
        made: dict[Place, torch.Tensor] = {result: _as_result(held[result.index], result) for result in self.results}
        return load(self.result, made.__getitem__, {})


class Holder:
    """Is handed the results' tensors and has the frame hold them. Each once, though it be returned twice."""

    deep = False

    def __init__(self, frame: Frame, copied: bool, settled: bool = True) -> None:
        self.results: dict[int, Result] = {}
        self._frame, self._copied, self._settled = frame, copied, settled

    def tensor(self, tensor: torch.Tensor) -> Result:
        """Hold one."""
        known = self.results.get(id(tensor))
        if known is not None:
            return known
        versioned = self._settled and not (self._copied or tensor.is_inference())
        version = tensor._version if versioned else None
        counter = counter_of(tensor) if versioned and self._frame.packs_kept else None
        index = self._frame.hold(tensor, copied=self._copied)
        result = self.results[id(tensor)] = Result(index, tensor.requires_grad, version, self._copied, counter)
        return result

    def module(self, module: nn.Module) -> None:
        """Passed on as it is."""

    def other(self, value: object) -> None:
        """Passed on as it is."""

    def instance(self, value: Any, since: int | None, memo: dict[int, Any]) -> Any:
        """Regions were seen to change such objects, or it is looked at closely."""
        return store_object(value, self, memo)

    def state(self, value: object) -> None:
        """Passed on as it is."""


def counter_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What has the version of a tensor, now and later, and none of its memory; ``None`` for a tensor of which that cannot be made."""
    if type(tensor) is not torch.Tensor:
        return None
    counter = tensor.detach()
    counter.data = _NOTHING
    return counter


def is_own(result: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether a result shares no memory with an argument. What gradients flow through is a view only where autograd knows of it."""
    if not result.requires_grad:
        return private.storage_key(result) not in set(map(private.storage_key, given))
    root = result if result._base is None else result._base
    for tensor in given:  # noqa: SIM110 – a generator takes longer
        if tensor is root or tensor._base is root:
            return False
    return True


def _as_result(tensor: torch.Tensor, result: Result) -> torch.Tensor:
    """A tensor that may be changed in its metadata, and if need be in its values: no leaf then, for autograd forbids that."""
    if not result.requires_grad:
        return tensor.detach().clone() if result.copied else tensor.detach()
    if not result.copied:
        return tensor.detach().requires_grad_()
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone()
