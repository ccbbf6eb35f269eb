"""One kept call: what is held of it between its forward and its replay."""

from __future__ import annotations

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
_NO_STATES: list[tuple[object, Any]] = []


class Around(int):
    """A tensor made inside the call that the hooks around the region hold: its place in ``Frame.held``."""


class Result(Place):
    """A tensor among the results.

    Attributes:
        index: its place in ``Frame.held``.
        requires_grad: of the result.
        version: of the result when it was returned; ``None`` where what is held is out of reach of those who write to it.
        copied: the replay may write to it.
    """

    __slots__ = ("copied", "index", "requires_grad", "version")

    def __init__(self, index: int, requires_grad: bool, version: int | None, copied: bool) -> None:
        self.index, self.requires_grad, self.version, self.copied = index, requires_grad, version, copied


class Kept:
    """What a replay needs to do without the call.

    Attributes:
        first: how many tensors the frame had saved when the call was entered.
        shapes: of the tensors that it was given.
        origins: for each tensor that autograd saved in it, where that comes from.
        result: what it returned, taken apart.
        results: the tensors in that.
        calls: of a module, how often each function had been called when it returned.
        random: where it left the random generators; ``None`` in a region that does not draw.
        states: where it left other generators.
    """

    __slots__ = ("calls", "first", "origins", "random", "result", "results", "shapes", "states")

    def __init__(self, first: int, shapes: list[torch.Size]) -> None:
        self.first = first
        self.shapes = shapes
        self.origins: list[Origin | Around] = []
        self.result: Any = None
        self.results: list[Result] = []
        self.calls: dict[Any, int] | None = None
        self.random: Random | None = None
        self.states = _NO_STATES

    def hold(self, holder: Holder, result: Any, given: list[torch.Tensor]) -> bool:
        """Hold what was returned, unless a part of it shares memory with an argument; returns whether it is held."""
        try:
            tensors = tensors_in(result)
        except InvalidInputError:
            return False
        if not all(is_own(tensor, given) for tensor in tensors):
            return False
        self.result = store(result, holder, {})
        self.results = list(holder.results.values())
        return True

    def hold_tensor(self, frame: Frame, tensor: torch.Tensor, settled: bool) -> None:
        """The same for a result that is just a tensor which nobody is known to write to; not ``settled`` if the call itself still is."""
        held, versioned = frame.held, settled and not tensor.is_inference()
        self.result = Result(len(held), tensor.requires_grad, tensor._version if versioned else None, copied=False)
        self.results = [self.result]
        held.append(tensor.detach())

    def note_random(self, states: list[object]) -> None:
        """Note where the call left the generators."""
        self.random = take_random()
        self.states = [(value, take_state(value)) for value in states]

    def held(self, frame: Frame, given: list[torch.Tensor]) -> dict[int, torch.Tensor] | None:
        """What is held, by its place in ``Frame.held``; ``None`` if the call has to be run.

        It has to be if it is given tensors of other shapes, or if a result was written to or let go of.
        """
        if [tensor.shape for tensor in given] != self.shapes:
            return None
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
        try:
            return {index: frame.unpack_held(frame.held[index]) for index in indices}
        except InputChangedError:  # written to in the replay of the region around, as it was in the forward
            return None

    def saved_again(self, frame: Frame, given: list[torch.Tensor], held: dict[int, torch.Tensor]) -> list[torch.Tensor] | None:
        """What the call would save, in order, made from these arguments; ``None`` if that cannot be.

        Places that nobody asks a replay for are filled with an empty tensor.
        """
        saved: list[torch.Tensor] = []
        for place, origin in enumerate(self.origins):
            if origin is ELSEWHERE:
                found: torch.Tensor | None = _NOTHING
            elif type(origin) is int:
                found = given[origin]
            elif type(origin) is Whole or type(origin) is View:
                found = origin.of(given[origin.place])
            elif type(origin) is Around:
                found = held[origin]
            elif type(origin) is Known:
                found = origin.tensor
            else:
                found = _NOTHING if self._is_there(frame, self.first + place) else None
            if found is None:
                return None
            saved.append(found)
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
        for origin in self.origins:
            if type(origin) is Around:
                frame.held[origin] = None

    def again(self, held: dict[int, torch.Tensor]) -> Any:
        """What the call returned; the generators are where it left them."""
        if self.random is not None:
            put_random(self.random)
        for value, state in self.states:
            put_state(value, state)
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
        versioned = self._settled and not (self._copied or self._frame.packs_kept or tensor.is_inference())
        version = tensor._version if versioned else None
        index = self._frame.hold(tensor, copied=self._copied)
        result = self.results[id(tensor)] = Result(index, tensor.requires_grad, version, self._copied)
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


def is_own(result: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether a result shares no memory with an argument. What gradients flow through is a view only where autograd knows of it."""
    if not result.requires_grad:
        return private.storage_key(result) not in set(map(private.storage_key, given))
    root = result if result._base is None else result._base
    return not any(tensor is root or tensor._base is root for tensor in given)


def _as_result(tensor: torch.Tensor, result: Result) -> torch.Tensor:
    """A tensor that may be changed in its metadata, and if need be in its values: no leaf then, for autograd forbids that."""
    if not result.requires_grad:
        return tensor.detach().clone() if result.copied else tensor.detach()
    if not result.copied:
        return tensor.detach().requires_grad_()
    with torch.enable_grad():
        return tensor.detach().requires_grad_().clone()
