"""What the code of a region can reach outside of its arguments and modules: found while it is watched, from the bytecode of its functions.

Functions that ran are followed from their local variables. Those that they name, and which did not run this time, are followed as far as
that can be told without running them: from globals, closures and, for a method, its object. A call that goes another way than the
watched one finds what it reads guarded as well.
"""

from __future__ import annotations

import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

from lowtide.engine._functions import is_region
from lowtide.engine._guards._attributes import ABSENT
from lowtide.engine._guards._outside import CONTAINERS, DEFAULTS, Place, Read, has_attributes, read
from lowtide.engine._guards._reads import Chain, Item, chains_of
from lowtide.engine._own import own_attribute
from lowtide.engine._sources import is_library
from lowtide.engine._state import has_state
from lowtide.engine._tree import is_ordinary

_MOST_PLACES = 128
_MOST_FUNCTIONS = 512
_CODE = (types.ModuleType, types.BuiltinFunctionType, type)
_WITH_ATTRIBUTES = frozenset({types.SimpleNamespace, types.FunctionType})
_ENVIRONMENT = frozenset({"environ", "getenv"})
_IN_PLACE = (os.environ, os.getenv)


class Outside:
    """The places that the code of a region reads.

    What is read of one object is read of others of its type as well: those that a later call is given in its place.

    Attributes:
        places: in the order in which they were found.
        environment: environment variables are read.
        stateful: those of the places where there is a random generator or the like.
    """

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.stateful: list[Place] = []
        self.environment = False
        self._known: dict[tuple[int, str], Place] = {}
        self._owners: dict[int, Place] = {}
        self._alike: dict[int, tuple[weakref.ref[type], dict[str, Place]]] = {}
        self._named: list[tuple[types.FunctionType, Any]] = []
        self._followed: set[types.CodeType] = set()

    def __bool__(self) -> bool:
        """Whether anything is read."""
        return bool(self.places or self._alike)

    def take(self, module: Callable[[nn.Module], object] | None = None, met: list[object] | None = None) -> list[Read]:
        """What is there now, and what the code reads of objects that no watched call has met, but others of their types.

        Args:
            module: is told of the modules.
            met: objects that a call can reach; those that are found are added.
        """
        if met is None:
            met = []
        taken = [read(place, module, met.append) for place in self.places]
        return [*taken, *(read(place, module, met.append) for place in self.places_in(met))] if self._alike and met else taken

    def places_in(self, met: list[object]) -> Iterator[Place]:
        """The places in objects that no watched call has met; ``met`` may grow meanwhile."""
        seen: set[int] = set()
        for value in met:
            alike = self._alike.get(id(type(value)))
            if alike is None or alike[0]() is not type(value) or id(value) in seen:
                continue
            seen.add(id(value))
            owned = self._owners.get(id(value))
            if owned is None or owned.owner() is not value:
                yield from [place.of(value) for place in alike[1].values()]

    def knows(self, values: list[object]) -> bool:
        """Whether all that the code reads of these objects is among ``places``."""
        return not self._alike or next(self.places_in(values), None) is None

    def led_to(self, met: list[object], module: Callable[[nn.Module], object]) -> None:
        """Tell ``module`` of all that every call finds: from places that are always there, and from those in objects that it was given.

        Args:
            met: the objects that it was given.
            module: is told of the modules.
        """
        left, met = self.places, [*met]
        given: set[int] = set()
        found = left
        while found:
            given.update(map(id, met))
            found = [place for place in left if id(place.owner()) in given or not has_attributes(type(place.owner()))]
            left = [place for place in left if place not in found]
            for place in found:
                read(place, module, met.append)

    def states(self) -> list[object]:
        """Objects there whose state is to be taken."""
        found = [place.read() for place in self.stateful]
        return [value for value in found if has_state(type(value))]

    def prune(self) -> None:
        """Forget places in objects that are gone."""
        self.places = [place for place in self.places if place.owner() is not None]
        self.stateful = [place for place in self.stateful if place.owner() is not None]
        self._known = {key: place for key, place in self._known.items() if place.owner() is not None}
        self._owners = {key: place for key, place in self._owners.items() if place.owner() is not None}
        self._alike = {key: (kind, names) for key, (kind, names) in self._alike.items() if kind() is not None}

    def note(self, frame: types.FrameType, inside: set[int]) -> None:
        """A function begins: note what its code will read.

        Args:
            frame: of the function.
            inside: ``id`` of the dictionaries of modules that are watched anyway.
        """
        self._followed.add(frame.f_code)
        function = _function_of(frame)
        if function is not None:
            self._add_defaults(function)
            self._add_cells(function)
        self._follow_all(frame.f_code, frame.f_globals, frame.f_locals, inside)

    def note_end(self, frame: types.FrameType, inside: set[int]) -> None:
        """It ends: note what its code reads of the objects that it looked up by itself, as those it went over in a loop."""
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        found = {name: value for name, value in frame.f_locals.items() if name not in given and name not in code.co_freevars}
        self._follow_all(code, {}, found, inside)

    def note_named(self, inside: set[int]) -> list[types.FunctionType]:
        """The call is over: follow the functions that were named and did not run; returns them."""
        found: list[types.FunctionType] = []
        while self._named and len(found) < _MOST_FUNCTIONS:
            function, owner = self._named.pop()
            if function.__code__ not in self._followed and not is_library(function.__code__.co_filename):
                self._followed.add(function.__code__)
                found.append(function)
                self._add_defaults(function)
                self._follow_all(function.__code__, function.__globals__, _locals_of(function, owner), inside)
        self._named.clear()
        self._followed.clear()
        return found

    def _follow_all(self, code: types.CodeType, table: dict[str, Any], local: dict[str, Any], inside: set[int]) -> None:
        for chain in chains_of(code):
            value = (table if chain.is_global else local).get(chain.root, ABSENT)
            if value is not ABSENT:
                if chain.is_global and _may_be_rebound(chain.root, value):
                    self._add(table, chain.root, f"global {chain.root!r}")
                given = not chain.is_global and chain.root not in code.co_freevars and bool(inside)
                self._follow(chain, value, inside, given=given)

    def _follow(self, chain: Chain, value: Any, inside: set[int], *, given: bool) -> None:
        lasting = chain.is_global or isinstance(value, nn.Module)
        path, owner = chain.root, None
        self.environment = self.environment or any(value is known for known in _IN_PLACE)
        for step in chain.steps:
            owner, path = value, f"{path}.{step}" if isinstance(step, str) else f"{path}[{step.key!r}]"
            value, is_place = _attribute(owner, step, inside) if isinstance(step, str) else (_entry(owner, step), False)
            if is_place:
                self._add(owner, str(step), path, lasting)
            self.environment = self.environment or (owner is os and step in _ENVIRONMENT)
            if value is ABSENT:
                break
        if chain.guess if value is ABSENT else chain.whole:
            self._add_whole(owner if value is ABSENT else value, chain.root, inside, lasting)
        if type(value) is types.FunctionType and (chain.steps or not given):
            self._add_defaults(value)
            self._add_cells(value)
            self._name(value, owner)
        elif isinstance(value, (types.MethodType, nn.Module)) and chain.steps:
            self._name(*_called_by(value))

    def _name(self, function: Any, owner: Any) -> None:
        if type(function) is types.FunctionType and function.__code__ not in self._followed and len(self._named) < _MOST_FUNCTIONS:
            self._named.append((function, owner))

    def _add_whole(self, owner: Any, path: str, inside: set[int], lasting: bool) -> None:
        """Any attribute of it may be read."""
        kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
        own = () if isinstance(owner, (type, nn.Module, types.ModuleType)) else own_attribute(owner, "__dict__", ())
        names = dict.fromkeys([*own, *(name for kind in kinds for name in vars(kind) if not name.startswith("__"))])
        for name in names:
            _, is_place = _attribute(owner, name, inside)
            if is_place:
                self._add(owner, name, f"{path}.{name}", lasting)

    def _add_cells(self, fn: types.FunctionType) -> None:
        if is_region(fn):
            return  # nobody rebinds its variables, and what it calls is reached as the region is taken apart
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
            if _may_be_rebound(name, _content(cell)):
                self._add(cell, name, f"variable {name!r} of {fn.__name__}")

    def _add_defaults(self, fn: types.FunctionType) -> None:
        """Default arguments that can be changed in place."""
        for name, values in zip(DEFAULTS, (fn.__defaults__ or (), (fn.__kwdefaults__ or {}).values()), strict=True):
            if any(type(value) in CONTAINERS for value in values):
                self._add(fn, name, f"default arguments of {fn.__name__}")

    def _add(self, owner: Any, name: str, label: str, lasting: bool = True) -> None:
        known = self._known.get((id(owner), name))
        if known is None or known.owner() is not owner:
            if not (lasting or type(owner).__weakrefoffset__) or len(self.places) >= _MOST_PLACES:  # no argument is to be kept alive
                self._owners.pop(id(owner), None)
                self._add_alike(Place(None, name, label), type(owner))
                return
            self._known[id(owner), name] = place = Place(owner, name, label)
            self.places.append(place)
            self._owners[id(owner)] = place
            self._add_alike(place, type(owner))
            if has_state(type(place.read())):
                self.stateful.append(place)

    def _add_alike(self, place: Place, kind: type) -> None:
        if not has_attributes(kind):
            return
        known, names = self._alike.get(id(kind), (None, {}))
        if known is None or known() is not kind:
            names = {}
            self._alike[id(kind)] = weakref.ref(kind), names
        names[place.name] = place


def _function_of(frame: types.FrameType) -> types.FunctionType | None:
    """The function that a frame runs, if it is a method of its first argument or a global by its name."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    tables = [vars(kind) for kind in type(first).__mro__] if first is not None else []
    found = (table.get(code.co_name) for table in (*tables, frame.f_globals))
    return next((value for value in found if type(value) is types.FunctionType and value.__code__ is code), None)


def _locals_of(function: types.FunctionType, owner: Any) -> dict[str, Any]:
    """What is known of its local variables before it runs: those around it, and the object that it is a method of."""
    code, found = function.__code__, {}  # type: types.CodeType, dict[str, Any]
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        found[name] = _content(cell)
    if owner is not None and code.co_argcount and getattr(type(owner), function.__name__, None) is function:
        found[code.co_varnames[0]] = owner
    return found


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _called_by(value: Any) -> tuple[Any, Any]:
    """The function that runs when this is called, and the object that it is a method of."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    own = value.__dict__.get("forward")
    forward: Callable[..., Any] = type(value).forward
    return (forward, value) if own is None else (own, None)


def _entry(owner: Any, step: Item) -> Any:
    """An entry of a container; of other things nothing is known without running code of the user's."""
    if isinstance(owner, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        owner, step = owner._modules, Item(str(step.key))
    if type(owner) in (dict, types.MappingProxyType) and step.key in owner:
        return owner[step.key]
    if type(owner) in (list, tuple) and type(step.key) is int and -len(owner) <= step.key < len(owner):
        return owner[step.key]
    return ABSENT


def _may_be_rebound(name: str, value: Any) -> bool:
    """Whether a global is a variable rather than something that was defined or imported by this name."""
    return not isinstance(value, (types.ModuleType, type)) and own_attribute(value, "__name__") != name


def _attribute(owner: Any, name: str, inside: set[int]) -> tuple[Any, bool]:
    """What an attribute is, and whether it is a place that has to be looked at. Runs no code of the user's."""
    if isinstance(owner, types.ModuleType):
        value = vars(owner).get(name, ABSENT)
        return value, _is_data(value) and not is_library(getattr(owner, "__file__", None) or "<frozen")
    if isinstance(owner, ContextVar):
        return (owner.get(ABSENT), True) if name == "get" else (ABSENT, False)
    if name == "__class__":
        return type(owner), False
    if isinstance(owner, threading.local):
        return getattr(owner, name, ABSENT), hasattr(owner, name)
    return _of_class(owner, name) if isinstance(owner, type) else _of_object(owner, name, inside)


def _of_object(owner: Any, name: str, inside: set[int]) -> tuple[Any, bool]:
    if isinstance(owner, nn.Module):
        for table in (owner._parameters, owner._buffers, owner._modules):
            if name in table:
                return table[name], False
    elif not is_ordinary(type(owner)) and type(owner) not in _WITH_ATTRIBUTES:
        return ABSENT, False
    own = own_attribute(owner, "__dict__", {})
    if name in own:
        return own[name], id(own) not in inside
    value, is_place = _of_class(type(owner), name)
    if isinstance(value, types.MemberDescriptorType):
        return getattr(owner, name, ABSENT), True
    return value, is_place


def _of_class(kind: type, name: str) -> tuple[Any, bool]:
    base = next((base for base in kind.__mro__ if name in vars(base)), object)
    value = vars(base).get(name, ABSENT)
    return value, _is_data(value) and base.__module__.partition(".")[0] not in ("builtins", "torch")


def _is_data(value: Any) -> bool:
    return value is not ABSENT and not isinstance(value, _CODE) and not hasattr(type(value), "__get__")
