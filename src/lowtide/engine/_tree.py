"""Values as they were: what may change after a call is taken apart when it is entered, and built anew for its replay.

Taken apart are containers, dataclasses, partial functions and functions with closures or globals of their own: a loop
variable that a lambda reads will have moved on by the time backward runs. The forward itself gets the caller's own objects:
what it writes into them is the caller's to see; what a replay writes goes into the copies. Tensors are handed out of the
structure, so that whoever holds it decides how each of them is held.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.engine._clock import clock
from lowtide.engine._functions import module_of_region, take_function, take_method, take_partial
from lowtide.engine._own import own_attribute
from lowtide.engine._parts import Box, Place, Taken, empty_list
from lowtide.engine._state import has_state
from lowtide.errors import InvalidInputError

Memo = dict[int, tuple[Any, Box]]
_MOST_OBJECTS = 5000


class Keeper(Protocol):
    """Who is handed what is no mere structure.

    Attributes:
        deep: take apart ordinary objects as well, to see whether they change.
    """

    deep: bool

    def tensor(self, tensor: torch.Tensor) -> object:
        """Return what stands for a tensor."""

    def module(self, module: nn.Module) -> None:
        """A module that the call may run."""

    def other(self, value: object) -> None:
        """An ordinary object, which is passed on as it is."""

    def instance(self, value: Any, since: int | None, memo: Memo) -> Any:
        """Return what stands for one that is to be taken apart; ``since``: since when regions are known to change such objects."""

    def state(self, value: object) -> None:
        """An object whose state is taken and restored: a random generator, or of a registered type."""


ATOMS = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), slice, range, type, type(len), type(torch)}
    | {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
)


def store(value: Any, keeper: Keeper, memo: Memo) -> Any:
    """Take a value apart.

    Args:
        value: what a call was given, or what it can reach.
        keeper: is handed tensors, modules and generators.
        memo: what was met so far, by ``id``: one that is met twice stays one. It keeps what it names alive.

    Raises:
        InvalidInputError: an iterator, which the forward would use up.
    """
    kind = type(value)
    if kind in ATOMS:
        return value
    if isinstance(value, torch.Tensor):
        return keeper.tensor(value)
    if kind is types.FunctionType:
        module = module_of_region(value)
        if module is not None:  # as it is below, in fewer steps: outer regions read theirs for each call
            keeper.module(module)
            return value
    try:
        taker = _TAKERS[kind]
    except KeyError:
        taker = _TAKERS[kind] = _taker_of(kind)
    if taker is None:
        return _store_other(value, keeper, memo)
    known = memo.get(id(value))
    if known is not None:
        return known[1]
    taken = taker(value)
    return value if taken is None else _fill(value, taken, keeper, memo)


def _fill(value: Any, taken: Taken, keeper: Keeper, memo: Memo) -> Any:
    box, parts = taken
    memo[id(value)] = (value, box)
    stored = []
    for part in parts:  # no comprehension: one frame less of the stack for each level
        stored.append(store(part, keeper, memo))  # noqa: PERF401
    box.parts = stored
    if box.steady and all(map(operator.is_, box.parts, parts)):
        del memo[id(value)]
        return value
    return box


def _store_other(value: Any, keeper: Keeper, memo: Memo) -> Any:
    if isinstance(value, nn.Module):
        keeper.module(value)
    elif has_state(type(value)):
        keeper.state(value)
    elif is_ordinary(type(value)):
        since = MUTABLE.get(type(value))
        if since is not None or (keeper.deep and len(memo) < _MOST_OBJECTS):
            known = memo.get(id(value))
            return known[1] if known is not None else keeper.instance(value, since, memo)
        keeper.other(value)
    elif type(value) is types.SimpleNamespace:
        keeper.other(value)
    return value


def store_object(value: Any, keeper: Keeper, memo: Memo) -> Any:
    """Take an ordinary object apart."""
    return _fill(value, take_object(value), keeper, memo)


def load(stored: Any, fetch: Callable[[Place], Any], memo: dict[int, Any]) -> Any:
    """Build a value again from what ``store`` returned; ``fetch`` turns a ``Place`` into its tensor."""
    if isinstance(stored, Place):
        return fetch(stored)
    if type(stored) is not Box:
        return stored
    if stored.original is not None:
        return stored.original
    if id(stored) in memo:
        return memo[id(stored)]
    if stored.fill is None:
        made = stored.make([load(part, fetch, memo) for part in stored.parts])
        memo[id(stored)] = made
        return made
    made = memo[id(stored)] = stored.make([])
    stored.fill(made, [load(part, fetch, memo) for part in stored.parts])
    return made


class _Collector:
    """Lists tensors."""

    deep = False

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def tensor(self, tensor: torch.Tensor) -> object:
        self.found.append(tensor)
        return None

    def module(self, module: nn.Module) -> None:
        pass

    def other(self, value: object) -> None:
        pass

    def instance(self, value: Any, since: int | None, memo: Memo) -> Any:
        return store_object(value, self, memo)

    def state(self, value: object) -> None:
        pass


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors of a value, in a fixed order, containers opened."""
    if isinstance(value, torch.Tensor):
        return [value]
    collector = _Collector()
    if not hasattr(type(value), "__next__"):
        store(value, collector, {})
    return collector.found


def places_in(stored: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Place]]:
    """Every ``Place`` with the path that leads to it; ``seen``: boxes that were gone through."""
    if isinstance(stored, Place):
        yield path, stored
    elif type(stored) is Box and (seen is None or id(stored) not in seen):
        seen = set() if seen is None else seen
        seen.add(id(stored))
        for index, part in enumerate(stored.parts):
            label = stored.labels[index] if index < len(stored.labels) else f"[{index}]"
            yield from places_in(part, f"{path}{label}", seen)


def mark_mutable(kind: type) -> None:
    """From now on objects of this type are taken apart: a region was seen to change one."""
    if kind not in MUTABLE:
        clock.now += 1
        MUTABLE[kind] = clock.now


def is_mutable(kind: type) -> bool:
    """Whether a region was seen to change an object of this type."""
    return kind in MUTABLE


def mutable_types() -> int:
    """How many types of objects regions were seen to change."""
    return len(MUTABLE)


def is_ordinary(kind: type) -> bool:
    """Whether objects of this type are data of the user's own, made of attributes."""
    known = _ORDINARY.get(kind)
    if known is None:
        known = _ORDINARY[kind] = _find_ordinary(kind)
    return known


def _find_ordinary(kind: type) -> bool:
    return (
        kind.__module__.partition(".")[0] not in _LIBRARIES
        and kind.__flags__ & _HEAP_TYPE != 0
        and (kind.__dictoffset__ != 0 or bool(slot_names(kind)))
        and not issubclass(kind, (type, BaseException, nn.Module))
        and kind.__new__ is object.__new__
        and not hasattr(kind, "__torch_function__")
    )


def is_transformers_cache(kind: type) -> bool:
    """Whether this is a key-value cache of transformers, or a layer of one: regions append to them. Found by name, without importing it."""
    return any(base.__module__ == "transformers.cache_utils" for base in kind.__mro__)


_ORDINARY: dict[type, bool] = {}
MUTABLE: dict[type, int] = {}
"""Types of objects that regions were seen to change, with the time on the ``clock`` when one was."""
_HEAP_TYPE = 1 << 9
_LIBRARIES = frozenset(
    {"builtins", "torch", "numpy", "lowtide", "contextvars", "threading", "logging", "weakref", "_weakref", "io", "_io", "types"}
)


def _take_list(value: list[Any]) -> Taken:
    return Box(empty_list, list.extend), value


def _take_tuple(value: tuple[Any, ...]) -> Taken:
    return Box(tuple, None), list(value)


def _take_dict(value: dict[Any, Any]) -> Taken:
    keys = list(value)
    box = Box(lambda _: {}, lambda made, parts: made.update(zip(keys, parts, strict=True)))
    box.labels = Keys(keys)
    return box, list(value.values())


class Keys:
    """The keys of a dictionary, and how its entries are written, for errors; that is made when it is read."""

    __slots__ = ("keys",)

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> str:
        return f"[{self.keys[index]!r}]"


def _take_set(value: set[Any]) -> Taken:
    return Box(lambda _: set(), lambda made, parts: made.update(parts)), list(value)


def _take_frozenset(value: frozenset[Any]) -> Taken:
    return Box(frozenset, None), list(value)


def _take_deque(value: collections.deque[Any]) -> Taken:
    length = value.maxlen
    return Box(lambda _: collections.deque(maxlen=length), lambda made, parts: made.extend(parts)), list(value)


def _take_other_dict(value: dict[Any, Any]) -> Taken:
    cls, keys = type(value), list(dict.keys(value))
    put: Any = collections.OrderedDict.__setitem__ if isinstance(value, collections.OrderedDict) else dict.__setitem__
    factory = value.default_factory if isinstance(value, collections.defaultdict) else None

    def fill(made: Any, parts: list[Any]) -> None:
        if factory is not None:
            made.default_factory = factory
        _set_attributes(made, parts[-1])
        for key, part in zip(keys, parts, strict=False):
            put(made, key, part)

    box = Box(lambda _: cls.__new__(cls), fill)
    box.labels = Keys(keys)
    return box, [*dict.values(value), _attributes(value)]


def _take_other_list(value: list[Any]) -> Taken:
    cls = type(value)

    def fill(made: Any, parts: list[Any]) -> None:
        _set_attributes(made, parts[-1])
        list.extend(made, parts[:-1])

    return Box(lambda _: cls.__new__(cls), fill), [*list.__iter__(value), _attributes(value)]


def _take_other_tuple(value: tuple[Any, ...]) -> Taken:
    cls = type(value)
    new: Any = tuple.__new__
    make: Any = cls if hasattr(cls, "n_fields") else functools.partial(new, cls)
    return Box(make, None), list(tuple.__iter__(value))


def take_object(value: Any) -> Taken:
    """An instance with attributes (``__dict__``, slots or both), attribute by attribute."""
    cls = type(value)
    names = [name for name in slot_names(cls) if hasattr(value, name)]

    def fill(made: Any, parts: list[Any]) -> None:
        _set_attributes(made, parts[-1])
        for name, part in zip(names, parts, strict=False):
            object.__setattr__(made, name, part)

    return Box(lambda _: object.__new__(cls), fill), [*(getattr(value, name) for name in names), _attributes(value)]


def _attributes(value: Any) -> dict[str, Any] | None:
    found: dict[str, Any] | None = own_attribute(value, "__dict__")
    return found


def _set_attributes(value: Any, attributes: dict[str, Any] | None) -> None:
    if attributes:
        value.__dict__.update(attributes)


def slot_names(cls: type) -> list[str]:
    """The attributes that have slots."""
    names = _SLOTS.get(cls)
    if names is None:
        names = []
        for base in cls.__mro__:
            slots = base.__dict__.get("__slots__", ())
            names += [slots] if isinstance(slots, str) else slots
        names = _SLOTS[cls] = [name for name in names if name not in ("__dict__", "__weakref__")]
    return names


_SLOTS: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _refuse(value: Any) -> Taken:
    raise InvalidInputError(
        f"a region needs arguments that can be read twice, but was given an iterator ({type(value).__name__}), "
        "which its forward would use up: pass list(...) of it"
    )


_TAKERS: dict[type, Callable[[Any], Taken | None] | None] = {
    list: _take_list,
    tuple: _take_tuple,
    dict: _take_dict,
    set: _take_set,
    frozenset: _take_frozenset,
    collections.deque: _take_deque,
    functools.partial: take_partial,
    types.FunctionType: take_function,
    types.MethodType: take_method,
}

_RULES: tuple[tuple[Callable[[type], bool], Callable[[Any], Taken] | None], ...] = (
    (lambda kind: issubclass(kind, nn.Module) or has_state(kind) or kind.__module__.startswith("lowtide.engine."), None),
    (is_transformers_cache, take_object),
    (lambda kind: issubclass(kind, dict), _take_other_dict),
    (lambda kind: issubclass(kind, list), _take_other_list),
    (lambda kind: issubclass(kind, tuple), _take_other_tuple),
    (lambda kind: issubclass(kind, collections.UserDict), take_object),
    (dataclasses.is_dataclass, take_object),
    (lambda kind: hasattr(kind, "__next__") and hasattr(kind, "__iter__"), _refuse),
)


def _taker_of(kind: type) -> Callable[[Any], Taken | None] | None:
    """How to take apart what is no plain container. None: it is passed on as it is."""
    return next((taker for test, taker in _RULES if test(kind)), None)
