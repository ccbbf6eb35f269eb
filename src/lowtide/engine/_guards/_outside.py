"""Values that the code of a region reads from outside of its arguments and modules, as audits saw.

Globals, attributes of objects, classes and modules of Python, variables and default arguments of functions that the region calls: whoever
changes one between forward and backward would have the replay compute something else. They are read in each call, about a tenth of
a microsecond each, and a replay finds those again that are others by then.

Not seen are values reached in another way than by names: an entry of a container by a computed key that is an object, and
that object changed.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from operator import is_
from typing import Any

import torch
from torch import nn

from lowtide.engine._guards._attributes import ABSENT, AttributeKeeper, Direct, fetch_direct, modified_in
from lowtide.engine._own import own_attribute
from lowtide.engine._parts import Box
from lowtide.engine._tree import Keys, is_ordinary, load, store

_LARGEST_CONTAINER = 64
CONTAINERS = frozenset({list, dict, set, deque})
_CALLABLE = frozenset({types.FunctionType, types.MethodType, functools.partial})
_METHODS = frozenset({staticmethod, classmethod})
STAND_INS: set[type] = set()
"""Of what the engine itself puts in the place of a function for a while: what is read there is the function."""
DEFAULTS = ("__defaults__", "__kwdefaults__")
# the place, the value, and its parts where it is a container
Read = tuple["Place", Any, Any]


class Version(int):
    """Of a tensor when it was read."""


class Place:
    """Somewhere outside that a value is read from.

    Attributes:
        name: of the attribute or variable.
        label: for people.
        copies: calls write to the tensor that is there: a replay is given a copy of what it was.
    """

    __slots__ = ("_owner", "_weak", "copies", "label", "name")

    def __init__(self, owner: Any, name: str, label: str) -> None:
        self.name, self.label, self.copies = name, label, False
        self._weak = not isinstance(owner, (dict, type, types.CellType)) and type(owner).__weakrefoffset__ != 0
        self._owner: Any = weakref.ref(owner) if self._weak else owner

    def of(self, owner: Any) -> Place:
        """The same place in another object of the type."""
        place = Place(owner, self.name, self.label)
        place.copies = self.copies
        return place

    def owner(self) -> Any:
        """What it is in; ``None`` if that is gone."""
        return self._owner() if self._weak else self._owner

    def in_object(self) -> bool:
        """Whether it is an attribute, and no variable: what is in variables is reached from the function that is called."""
        return not isinstance(self.owner(), (dict, types.CellType))

    def read(self) -> Any:
        """The value that is there now, or ``ABSENT``."""
        owner = self.owner()
        if type(owner) is dict:
            return owner.get(self.name, ABSENT)
        if type(owner) is types.CellType:
            return _content(owner)
        if type(owner) is ContextVar:
            return owner.get(ABSENT)
        value: Any = getattr(owner, self.name, ABSENT)
        return value.__wrapped__ if type(value) in STAND_INS else value

    def stored(self) -> Any:
        """What ``write`` has to be given for all to be as it is now: of a static method, that is not the function that is read."""
        owner = self.owner()
        if owner is None or type(owner) in (dict, types.CellType, ContextVar):
            return self.read()
        return own_attribute(_holder(owner, self.name), "__dict__", {}).get(self.name, self.read())

    def write(self, value: Any) -> None:
        """Put a value there; ``ABSENT`` leaves what is there, and a replay runs in the context of its forward anyway."""
        owner = self.owner()
        if value is ABSENT or type(owner) is ContextVar:
            return
        if type(owner) is dict:
            owner[self.name] = value
        elif type(owner) is types.CellType:
            owner.cell_contents = value
        elif owner is not None:
            holder = _holder(owner, self.name)
            there = vars(holder).get(self.name) if isinstance(holder, type) else None
            setattr(holder, self.name, _as_method(value, there))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _as_method(value: Any, there: Any) -> Any:
    """What to put in a class for ``value`` to be read from it, where a static or class method is."""
    if type(value) in _METHODS or type(there) not in _METHODS:
        return value
    return type(there)(getattr(value, "__func__", value))


def _holder(owner: Any, name: str) -> Any:
    """Where an attribute is: in the object, or in a class of it."""
    if name in own_attribute(owner, "__dict__", ()):
        return owner
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return next((kind for kind in kinds if name in vars(kind) and not hasattr(vars(kind)[name], "__set__")), owner)


def read(place: Place, module: Callable[[nn.Module], object] | None = None, other: Callable[[object], object] | None = None) -> Read:
    """What is in a place; the parts of a container as well, for it may be changed itself.

    Args:
        place: where to look.
        module, other: are told of modules and of ordinary objects there.
    """
    value = place.read()
    if (type(value) in CONTAINERS or type(value) is tuple) and len(value) <= _LARGEST_CONTAINER:
        return place, value, store(value, AttributeKeeper(module=module, other=other, copy=place.copies), {})
    if module is not None and type(value) in _CALLABLE and place.in_object():
        stored = store(value, AttributeKeeper(module=module, other=other, copy=place.copies), {})
        return place, value, stored if type(stored) is Box else None  # what it reads is in its closure
    if module is not None and isinstance(value, nn.Module):
        store(value, AttributeKeeper(module=module, other=other), {})
    elif other is not None and has_attributes(type(value)):
        other(value)
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return place, value, copy_of(value) if place.copies else Version(value._version)
    return place, value, None


def has_attributes(kind: type) -> bool:
    """Whether objects of a type are made of attributes of the user's."""
    return kind is types.SimpleNamespace or is_ordinary(kind)


def copy_of(tensor: torch.Tensor) -> Direct:
    """A tensor as it is now, of which each replay gets a copy of its own."""
    stored = Direct(tensor)
    stored.copy()
    return stored


def written_since(taken: list[Read]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The tensors that were modified since: what they are called, themselves and the version that they had."""
    for place, value, parts in taken:
        if type(parts) is Version:
            if value._version != parts:
                yield place.label, value, parts
        elif parts is not None:
            yield from modified_in(parts, place.label)


def changed(taken: list[Read]) -> list[Read]:
    """Those that are others by now."""
    return [entry for entry in taken if _is_other(entry)]


def _is_other(entry: Read) -> bool:
    place, value, parts = entry
    now = place.read()
    if now is not value:
        return not (type(now) is type(value) and isinstance(now, (int, float, str)) and now == value)
    if isinstance(value, torch.Tensor):
        return value._version != parts if type(parts) is Version else parts is not None
    if parts is None or (type(value) is list and len(value) == len(parts.parts) and all(map(is_, value, parts.parts))):
        return False  # those that are kept as they are hold nothing that could have changed
    return not _same_parts(parts, store(value, AttributeKeeper(), {}))


def _same_parts(one: Any, other: Any, seen: frozenset[int] = frozenset()) -> bool:
    if isinstance(one, Box) and isinstance(other, Box):
        if id(one) in seen:  # a function that calls itself
            return True
        seen |= {id(one)}
        if len(one.parts) != len(other.parts) or _keys_of(one) != _keys_of(other):
            return False
        return all(_same_parts(*pair, seen) for pair in zip(one.parts, other.parts, strict=True))
    if isinstance(one, Direct) and isinstance(other, Direct):
        return one.is_as(other)
    return one is other or (isinstance(one, (int, float, str)) and one == other)


def _keys_of(box: Box) -> list[Any] | None:
    """Of a dictionary that was taken apart."""
    return box.labels.keys if isinstance(box.labels, Keys) else None


def put_outside(taken: list[Read]) -> list[tuple[Place, Any]]:
    """Have the values that were taken where others are by now; returns what is there, for ``put_back_outside``."""
    moved = changed(taken)
    undo = [(place, place.stored()) for place, _, _ in moved]  # all before any is written: two may be one, reached in two ways
    memo: dict[int, Any] = {}
    # Before any is written, for memory may run out.
    values = [value if parts is None or type(parts) is Version else load(parts, fetch_direct, memo) for _, value, parts in moved]
    written = 0
    try:
        for (place, _), value in zip(undo, values, strict=True):
            place.write(value)
            written += 1
    except BaseException:  # the user's own __setattr__ may refuse
        put_back_outside(undo[:written])
        raise
    return undo


def put_back_outside(undo: list[tuple[Place, Any]]) -> None:
    """Undo ``put_outside``."""
    for place, value in undo:
        place.write(value)
