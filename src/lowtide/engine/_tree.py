"""Arguments as they were: containers are copied when a region is entered and built anew for its replay.

Tensors are taken out of the structure, so that whoever holds it decides how each of them is held. The forward itself gets
the caller's own containers: what it writes into them is the caller's to see.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lowtide.errors import InvalidInputError

Keep = Callable[[torch.Tensor], object]
Memo = dict[int, Any]


class Place:
    """Where a tensor was in the structure; ``load`` is asked for it at replay."""

    __slots__ = ()


class Box:
    """A container, taken apart: how to make an empty one and how to fill it."""

    __slots__ = ("fill", "make", "parts")

    def __init__(self, make: Callable[[list[Any]], Any], fill: Callable[[Any, list[Any]], None] | None) -> None:
        self.make = make
        self.fill = fill
        self.parts: list[Any] = []


_ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, type}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)


def store(value: Any, keep: Keep, memo: Memo) -> Any:
    """Take a value apart: tensors through ``keep``, containers copied, everything else as it is.

    Args:
        value: what was passed to the region.
        keep: returns what stands for a tensor.
        memo: containers met so far, by ``id``: one that is met twice stays one. It keeps what it names alive.

    Raises:
        InvalidInputError: an iterator, which the forward would use up.
    """
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return keep(value)
    taker = _TAKERS.get(kind) or _taker_of(kind)
    if taker is None:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    if taker is _refuse:
        _refuse(value)
    box, parts = taker(value)
    memo[id(value)] = (value, box)
    box.parts = [store(part, keep, memo) for part in parts]
    return box


def load(stored: Any, fetch: Callable[[Place], Any], memo: Memo) -> Any:
    """Build a value again from what ``store`` returned; ``fetch`` turns a ``Place`` into its tensor."""
    if isinstance(stored, Place):
        return fetch(stored)
    if type(stored) is not Box:
        return stored
    if id(stored) in memo:
        return memo[id(stored)]
    if stored.fill is None:
        made = stored.make([load(part, fetch, memo) for part in stored.parts])
        memo[id(stored)] = made
        return made
    made = memo[id(stored)] = stored.make([])
    stored.fill(made, [load(part, fetch, memo) for part in stored.parts])
    return made


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of a result, in a fixed order, containers opened."""
    found: list[torch.Tensor] = []
    store(value, found.append, {}) if not hasattr(type(value), "__next__") else None
    return iter(found)


def places_in(stored: Any, path: str) -> Iterator[tuple[str, Place]]:
    """Every ``Place`` with the path that leads to it: ``batch['x'][0]`` is part 1 of part 0 and so on."""
    if isinstance(stored, Place):
        yield path, stored
    elif type(stored) is Box:
        for index, part in enumerate(stored.parts):
            yield from places_in(part, f"{path}[{index}]")


Taken = tuple[Box, list[Any]]


def _attributes(value: Any) -> list[Any]:
    return [getattr(value, "__dict__", None)]


def _set_attributes(value: Any, attributes: dict[str, Any] | None) -> None:
    if attributes:
        value.__dict__.update(attributes)


def _take_list(value: list[Any]) -> Taken:
    return Box(lambda _: [], lambda made, parts: made.extend(parts)), value


def _take_tuple(value: tuple[Any, ...]) -> Taken:
    return Box(tuple, None), list(value)


def _take_dict(value: dict[Any, Any]) -> Taken:
    keys = list(value)
    return Box(lambda _: {}, lambda made, parts: made.update(zip(keys, parts, strict=True))), list(value.values())


def _take_set(value: set[Any]) -> Taken:
    return Box(lambda _: set(), lambda made, parts: made.update(parts)), list(value)


def _take_frozenset(value: frozenset[Any]) -> Taken:
    return Box(frozenset, None), list(value)


def _take_deque(value: collections.deque[Any]) -> Taken:
    length = value.maxlen
    return Box(lambda _: collections.deque(maxlen=length), lambda made, parts: made.extend(parts)), list(value)


def _take_ordered(value: collections.OrderedDict[Any, Any]) -> Taken:
    cls, keys = type(value), list(value.keys())

    def fill(made: Any, parts: list[Any]) -> None:
        _set_attributes(made, parts.pop())
        for key, part in zip(keys, parts, strict=True):
            collections.OrderedDict.__setitem__(made, key, part)

    return Box(lambda _: cls.__new__(cls), fill), [*collections.OrderedDict.values(value), *_attributes(value)]


def _take_other_dict(value: dict[Any, Any]) -> Taken:
    cls, keys = type(value), list(dict.keys(value))
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None

    def fill(made: Any, parts: list[Any]) -> None:
        if factory is not None:
            made.default_factory = factory
        _set_attributes(made, parts.pop())
        for key, part in zip(keys, parts, strict=True):
            dict.__setitem__(made, key, part)

    return Box(lambda _: cls.__new__(cls), fill), [*dict.values(value), *_attributes(value)]


def _take_other_list(value: list[Any]) -> Taken:
    cls = type(value)

    def fill(made: Any, parts: list[Any]) -> None:
        _set_attributes(made, parts.pop())
        list.extend(made, parts)

    return Box(lambda _: cls.__new__(cls), fill), [*list.__iter__(value), *_attributes(value)]


def _take_other_tuple(value: tuple[Any, ...]) -> Taken:
    cls = type(value)
    return Box(lambda parts: tuple.__new__(cls, parts), None), list(tuple.__iter__(value))


def take_object(value: Any) -> Taken:
    """An instance with attributes (``__dict__``, slots or both), attribute by attribute."""
    cls = type(value)
    names = [name for name in _slot_names(cls) if hasattr(value, name)]

    def fill(made: Any, parts: list[Any]) -> None:
        _set_attributes(made, parts.pop())
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(made, name, part)

    return Box(lambda _: cls.__new__(cls), fill), [*(getattr(value, name) for name in names), *_attributes(value)]


def _slot_names(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _refuse(value: Any) -> Taken:
    raise InvalidInputError(
        f"a region needs arguments that can be read twice, but was given an iterator ({type(value).__name__}), "
        "which its forward would use up: pass list(...) of it"
    )


_TAKERS: dict[type, Callable[[Any], Taken]] = {
    list: _take_list,
    tuple: _take_tuple,
    dict: _take_dict,
    set: _take_set,
    frozenset: _take_frozenset,
    collections.deque: _take_deque,
}
_NONE: set[type] = set()


def _taker_of(kind: type) -> Callable[[Any], Taken] | None:
    """How to take apart what is no plain container; remembered by type. None: it is passed on as it is."""
    if kind in _NONE:
        return None
    for test, taker in _RULES:
        if test(kind):
            _TAKERS[kind] = taker
            return taker
    _NONE.add(kind)
    return None


_RULES: tuple[tuple[Callable[[type], bool], Callable[[Any], Taken]], ...] = (
    (lambda kind: issubclass(kind, collections.OrderedDict), _take_ordered),
    (lambda kind: issubclass(kind, dict), _take_other_dict),
    (lambda kind: issubclass(kind, list), _take_other_list),
    (lambda kind: issubclass(kind, tuple), _take_other_tuple),
    (lambda kind: issubclass(kind, collections.UserDict), take_object),
    (lambda kind: dataclasses.is_dataclass(kind) and not issubclass(kind, torch.nn.Module), take_object),
    (lambda kind: hasattr(kind, "__next__") and hasattr(kind, "__iter__"), _refuse),
)
