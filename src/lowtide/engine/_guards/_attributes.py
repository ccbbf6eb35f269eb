"""Attributes of modules that a call changes: a replay sees what they were, and afterwards they are what they became."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterator, Mapping
from operator import is_
from typing import Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._parts import Place
from lowtide.engine._tree import load, places_in, slot_names, store, store_object

ABSENT = object()
_SMALL_BYTES = 1 << 16
# the dictionary, the name, and the value taken apart
Attributes = tuple[dict[str, Any], str, Any]


class Direct(Place):
    """A tensor that an attribute referred to.

    Attributes:
        tensor: itself, or a copy where calls write to it.
        copied: it is a copy: each replay gets another.
        version: of the tensor when it was met.
    """

    __slots__ = ("copied", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.copied = False
        self.version = _version_of(tensor)

    def copy(self) -> None:
        """Hold a copy: the tensor is written to."""
        self.tensor = self.tensor.detach().clone().requires_grad_(self.tensor.requires_grad)
        self.copied = True

    def is_modified(self) -> bool:
        """Whether the tensor was written to since."""
        return not self.copied and _version_of(self.tensor) != self.version

    def is_as(self, other: Direct) -> bool:
        """Whether the tensor is the same and has not been written to in between."""
        return self.tensor is other.tensor and self.version == other.version


class SlotTable(Mapping[str, Any]):
    """The attributes of an object that has slots, as a dictionary."""

    def __init__(self, value: object, names: list[str]) -> None:
        self._value, self._names = value, names

    @classmethod
    def of(cls, value: object) -> SlotTable | None:
        """Those of an object; ``None`` if it has none."""
        names = slot_names(type(value))
        return cls(value, names) if names else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._value, name, ABSENT)

    def update(self, values: Mapping[str, Any]) -> None:
        """Set some of them."""
        for name, value in values.items():
            if value is not ABSENT:
                object.__setattr__(self._value, name, value)


class AttributeKeeper:
    """Takes attributes apart.

    Attributes:
        deep: down to the attributes of ordinary objects.
        copied_below: tensors of fewer bytes are copied.
        states: generators that were met.
        places: tensors that were met.
    """

    def __init__(
        self,
        *,
        deep: bool = False,
        copy: bool = False,
        other: Callable[[object], object] | None = None,
        module: Callable[[nn.Module], object] | None = None,
    ) -> None:
        self.deep = deep
        self._other = other
        self._module = module
        self.states: list[object] = []
        self.places: list[Direct] = []
        self.copied_below = sys.maxsize if copy else 0

    def tensor(self, tensor: torch.Tensor) -> Place:
        """Note a tensor."""
        place = Direct(tensor)
        if self.copied_below and private.bytes_of(tensor) < self.copied_below:
            place.copy()
        self.places.append(place)
        return place

    def module(self, module: nn.Module) -> None:
        """Modules in the tree are watched anyway; others have to be."""
        if self._module is not None:
            self._module(module)

    def other(self, value: object) -> None:
        """Ordinary objects in attributes are looked at by audits."""
        if self._other is not None:
            self._other(value)

    def instance(self, value: Any, since: int | None, memo: dict[int, Any]) -> Any:
        """Regions were seen to change such objects, or it is looked at closely."""
        return store_object(value, self, memo)

    def state(self, value: object) -> None:
        """Note a generator."""
        self.states.append(value)


def take_attributes(places: list[tuple[dict[str, Any], str]], keeper: AttributeKeeper) -> list[Attributes]:
    """What these attributes are now, taken apart by ``keeper``."""
    memo: dict[int, Any] = {}
    return [(own, name, store(own[name], keeper, memo) if name in own else ABSENT) for own, name in places]


def take_changed(places: list[tuple[dict[str, Any], str]], overwritten: Container[tuple[int, str]]) -> list[Attributes]:
    """What these attributes are now, which calls change.

    One that they write to is copied, for a replay has to see what it was. Where they were only seen to put another value in its place, what
    it was stays what it was, and is held: it may be an activation that the module keeps for later. What is small is copied even so, for
    another call may write to it.

    Args:
        places: the dictionary that each is in, and its name.
        overwritten: those that calls write to, by ``id`` of the dictionary and name.
    """
    keeper, memo = AttributeKeeper(), {}  # type: tuple[AttributeKeeper, dict[int, Any]]
    taken = []
    for own, name in places:
        keeper.copied_below = sys.maxsize if (id(own), name) in overwritten else _SMALL_BYTES
        taken.append((own, name, store(own[name], keeper, memo) if name in own else ABSENT))
    return taken


def put_attributes(taken: list[Attributes]) -> list[Attributes]:
    """Make the attributes what they were; returns what they are now, to be put back."""
    return set_attributes(load_attributes(taken))


def load_attributes(taken: list[Attributes]) -> list[Attributes]:
    """What the attributes are to be. Memory may run out, for some are copied."""
    memo: dict[int, Any] = {}
    return [(own, name, ABSENT if stored is ABSENT else load(stored, fetch_direct, memo)) for own, name, stored in taken]


def set_attributes(wanted: list[Attributes]) -> list[Attributes]:
    """Make the attributes these; returns what they are now, to be set again. Nothing can go wrong halfway."""
    before = [(own, name, own.get(name, ABSENT)) for own, name, _ in wanted]
    for own, name, value in wanted:
        _set(own, name, value)
    return before


def put_objects(taken: list[tuple[Any, list[Any]]]) -> list[tuple[Any, dict[str, Any]]]:
    """Make the attributes of ordinary objects what they were; returns those that had become others."""
    moved = []
    for own, values in taken:
        if not all(map(is_, own.values(), values)):
            wanted = {name: value for name, value in zip(own, values, strict=False) if own[name] is not value}
            moved.append((own, {name: own[name] for name in wanted}))
            own.update(wanted)
    return moved


def modified_in(stored: Any, label: str) -> Iterator[tuple[str, torch.Tensor, int]]:
    """The tensors of something taken apart that were written to since: what they are called, themselves and the version that they had."""
    for path, place in places_in(stored, label):
        if isinstance(place, Direct) and place.is_modified():
            yield path, place.tensor, place.version


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def fetch_direct(place: Place) -> torch.Tensor:
    """The tensor of a ``Direct``."""
    assert isinstance(place, Direct)
    return place.tensor.detach().clone().requires_grad_(place.tensor.requires_grad) if place.copied else place.tensor


def _set(own: dict[str, Any], name: str, value: Any) -> None:
    if value is ABSENT:
        own.pop(name, None)
    else:
        own[name] = value
