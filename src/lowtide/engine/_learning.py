"""What a call changes of the objects that it can reach: noted before, compared after.

Learned is by place (which attribute, which buffer, which argument), so that later calls note just that.
"""

from __future__ import annotations

import random
import weakref
from bisect import insort
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lowtide import _torch_private as private
from lowtide.engine._guards._attributes import ABSENT, AttributeKeeper, Direct
from lowtide.engine._guards._modules import Watch, version_of
from lowtide.engine._guards._outside import Version, copy_of
from lowtide.engine._guards._random import NUMPY, PYTHON
from lowtide.engine._parts import Box, Held, Made, Place
from lowtide.engine._replay import tell_once
from lowtide.engine._state import take_state
from lowtide.engine._tree import Memo, is_ordinary, mark_mutable, places_in, store

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame

_LARGEST_COPY_BYTES = 1 << 20
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Before:
    """The objects that a call can reach, as they were when it was entered."""

    def __init__(self, frame: Frame, call: Call, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._frame, self._call = frame, call
        self._memo: Memo = {}
        self._python_state = frame.region.options.python_state
        if self._python_state:
            call.take_deep(frame, self._memo, target, args, kwargs)
        self._random = random.getstate(), _numpy_state()
        self._inputs = list(frame.inputs.values())
        self._watched: list[_WatchBefore] = []
        self.note_watches()
        self._written: dict[int, torch.Tensor] = {}
        self._note_storages()

    def note_watches(self) -> None:
        """Modules that were met since, which have not run yet."""
        found = self._call.watches[len(self._watched) :]
        self._watched += [_WatchBefore(watch, taken, self._python_state) for watch, taken in found]

    def _note_storages(self) -> None:
        """Of what the call was given: by storage, the place, the tensor and what stands for it."""
        self._storages: dict[int, list[tuple[int, torch.Tensor, Held | Made]]] = {}
        self._copied: set[int] = set()
        for place, (tensor, known) in enumerate(self._inputs):
            key = private.storage_key(tensor)
            if isinstance(known, Made) or not known.copied:
                self._storages.setdefault(key, []).append((place, tensor, known))
            else:
                self._copied.add(key)

    def about_to_write(self, tensor: torch.Tensor, key: int) -> None:
        """A tensor that was there before is about to be written to: copy all that share its storage."""
        known = key in self._copied
        self._copied.add(key)
        for place, original, stands in self._storages.pop(key, ()):
            if isinstance(stands, Held):
                self._frame.copy_input(original, stands)
            self._call.profile.copied.add(place)
            known = True
        for watched in self._watched:
            known = watched.about_to_write(key) or known
        known = self._copy_outside(key) or known
        if known:
            self._copied.add(key)
        if not known and key not in self._written:
            self._written[key] = tensor

    def _copy_outside(self, key: int) -> bool:
        """Copy a tensor that is reached elsewhere."""
        outside, found = self._call.outside, False
        for at, (place, value, parts) in enumerate(outside):
            if type(parts) is Version and private.storage_key(value) == key:
                place.copies = found = True
                outside[at] = place, value, copy_of(value)
            elif parts is not None:
                for _, direct in places_in(parts, ""):
                    if isinstance(direct, Direct) and not direct.copied and private.storage_key(direct.tensor) == key:
                        place.copies = found = True
                        direct.copy()
        return found

    def learn(self, draws: bool) -> None:
        """Compare, and let profile and watches know."""
        profile, call = self._call.profile, self._call
        python, numpy = self._random
        profile.python_random = profile.python_random or draws or python != random.getstate()
        profile.numpy_random = profile.numpy_random or draws or not _same_numpy(numpy, _numpy_state())
        if profile.python_random and all(known is not PYTHON for known, _ in call.states):
            call.states.append((PYTHON, python))
        if profile.numpy_random and all(known is not NUMPY for known, _ in call.states):
            call.states.append((NUMPY, numpy))
        _keep_unchanged(self._memo, {id(tensor): known for tensor, known in self._inputs})
        profile.kinds.update(weakref.ref(type(value)) for value in chain((value for value, _ in self._memo.values()), call.met))
        for watched in self._watched:
            watched.learn(call)
        self.is_news = any(watched.is_news for watched in self._watched)
        if self._written:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self._written.values())
            tell_once(
                profile,
                f"region {self._frame.region.name!r} writes to tensors that are neither its arguments nor buffers or attributes of "
                f"its modules (shapes {shapes}): each replay writes to them again. Pass them as arguments, or do it outside the region",
            )


class _WatchBefore:
    """The attributes and buffers of one module tree.

    Attributes:
        is_news: an attribute got its first tensor, so that whether calls write to it is not known yet.
    """

    def __init__(self, watch: Watch, taken: Any, python_state: bool) -> None:
        self._watch, self._taken = watch, taken
        self._keeper = AttributeKeeper(deep=True)
        self._memo: Memo = {}
        places = watch.attributes() if python_state else []
        self._attributes = [(own, name, own[name], store(own[name], self._keeper, self._memo)) for own, name in places]
        self._states = [(value, take_state(value)) for value in self._keeper.states]
        self._storages = {private.storage_key(t): i for i, t in enumerate(watch.tensors()) if t is not None and not t.is_inference()}
        self._direct: dict[int, list[Direct]] = {}
        for place in self._keeper.places:
            self._direct.setdefault(private.storage_key(place.tensor), []).append(place)
        self._copies = {
            index: t.detach().clone()
            for index, t in enumerate(taken[0])
            if t is not None and not t.requires_grad and private.bytes_of(t) <= _LARGEST_COPY_BYTES and self._is_news_of(index)
        }
        self._written: set[int] = set()
        self._python_state = python_state
        self.is_news = False

    def about_to_write(self, key: int) -> bool:
        index = self._storages.get(key)
        if index is not None:
            self._written.add(index)
        if index is not None and index not in self._copies and self._is_news_of(index):
            self._copies[index] = self._taken[0][index].detach().clone()
        places = self._direct.pop(key, [])
        for place in places:
            place.copy()
        return index is not None or bool(places)

    def _is_news_of(self, index: int) -> bool:
        """Whether it would be new that calls write to a tensor. A framework that gathers parameters fills them, in replays as well."""
        return index not in self._watch.written and not self._watch.is_managed(index)

    def learn(self, call: Call) -> None:
        tensors, versions = self._taken[0], self._taken[1]
        for index, copy in self._copies.items():
            # With the same bits: this time it was written what was there, as by an iteration that has converged, or the mean of zeros.
            # Batch norm does not even count its versions.
            written = index in self._written or version_of(tensors[index]) != versions[index]
            if written or not _same_bits(copy, tensors[index]):
                if index not in self._watch.written:  # an audit inside this one may have learned it meanwhile
                    insort(self._watch.written, index)
                tensors[index], versions[index] = copy.requires_grad_(tensors[index].requires_grad), -1
        self._learn_attributes(call)
        self._watch.find_loose()
        for value, state in self._states:
            if isinstance(value, _GENERATORS) or not _same_state(state, take_state(value)):  # a generator is there to be drawn from
                if all(value is not known for known, _ in call.states):
                    call.states.append((value, state))
                if all(value is not known for known in self._watch.states):
                    self._watch.note_state(value)

    def _learn_attributes(self, call: Call) -> None:
        changed = _keep_unchanged(self._memo, {})
        known = {(id(own), name) for own, name in self._watch.changed}
        found = [
            (own, name, stored)
            for own, name, value, stored in self._attributes
            if own.get(name, ABSENT) is not value or _touched(stored, changed)
        ]
        if self._python_state:
            there = {(id(own), name) for own, name, _, _ in self._attributes}
            found += [(own, name, ABSENT) for own, name in self._watch.attributes() if (id(own), name) not in there]
        for own, name, stored in found:
            if any(isinstance(place, Direct) and place.copied for _, place in places_in(stored, "")):
                self._watch.overwritten.add((id(own), name))
                call.attributes = [(table, at, stored if table is own and at == name else then) for table, at, then in call.attributes]
            if (id(own), name) not in known:
                self._watch.note_changed(own, name)
                call.attributes.append((own, name, stored))
                self.is_news = self.is_news or (isinstance(own.get(name), torch.Tensor) and not isinstance(stored, Direct))


def learn_surprises(call: Call, watch: Watch, rebound: list[tuple[dict[str, Any], str, Any]]) -> None:
    """Attributes that a call which was not watched gave another value."""
    known = {(id(own), name) for own, name in watch.changed}
    for own, name, old in rebound:
        if (id(own), name) not in known:
            watch.note_changed(own, name)
            call.attributes = [*call.attributes, (own, name, store(old, AttributeKeeper(), {}))]
            if isinstance(own.get(name), torch.Tensor):
                call.profile.left = 0  # the next call shows whether it writes to it


def _keep_unchanged(memo: Memo, places: dict[int, Held | Made]) -> set[int]:
    """Compare each object with what it was. Ordinary ones that did not change are passed on as they are; returns the others.

    Args:
        memo: the objects, by ``id``.
        places: by ``id``, what stands for the tensors that the call was given.
    """
    changed = {id(box) for value, box in memo.values() if _differs(value, box, memo, places)}
    grown = True
    while grown:
        touched = {id(box) for _, box in memo.values() if id(box) not in changed and any(id(part) in changed for part in box.parts)}
        changed |= touched
        grown = bool(touched)
    for value, box in memo.values():
        if is_ordinary(type(value)):
            if id(box) in changed:
                mark_mutable(type(value))
            else:
                box.original = value
    return changed


def _differs(value: Any, box: Box, memo: Memo, places: dict[int, Held | Made]) -> bool:
    """Whether an object has other parts than it had."""
    now = _parts_of(value)
    if now is None:
        return False
    if len(now) != len(box.parts):
        return True
    return any(not _is_part(part, stored, memo, places) for part, stored in zip(now, box.parts, strict=True))


def _parts_of(value: Any) -> list[Any] | None:
    from lowtide.engine import _tree

    taker = _tree._TAKERS.get(type(value)) or (_tree.take_object if is_ordinary(type(value)) else None)
    taken = None if taker is None else taker(value)
    return None if taken is None else list(taken[1])


def _is_part(part: Any, stored: Any, memo: Memo, places: dict[int, Held | Made]) -> bool:
    if isinstance(stored, Box):
        known = memo.get(id(part))
        return known is not None and known[1] is stored
    if isinstance(stored, Direct):
        return part is stored.tensor or stored.copied
    if isinstance(stored, Place):
        return places.get(id(part)) is stored and not (isinstance(stored, Held) and stored.copied)
    return part is stored or (type(part) is type(stored) and isinstance(part, (int, float, str, bool)) and part == stored)


def _touched(stored: Any, changed: set[int]) -> bool:
    return id(stored) in changed or any(isinstance(place, Direct) and place.copied for _, place in places_in(stored, ""))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one, other) or (one.shape == other.shape and bool(torch.all((one == other) | (one.isnan() & other.isnan()))))
    except (RuntimeError, NotImplementedError):
        return True


def _numpy_state() -> Any:
    return np.random.get_state()


def _same_numpy(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and np.array_equal(one[1], other[1]))


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):
        return False
