"""Functions as they were: with the values that their closure, their globals and their attributes had when they were called.

A frame must not hold a closure itself. Its cells may be given the region's own output later (``h = layer(h)`` in a loop), and
that would be a cycle through autograd's nodes, which no garbage collector sees.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from lowtide.engine._parts import Box, Taken

_EMPTY = object()
_PLAIN = (types.ModuleType, type, types.BuiltinFunctionType)
_STEADY = frozenset({int, float, complex, bool, str, bytes, type(None)})
_LARGEST_GLOBAL = 1000
_NAMES: weakref.WeakKeyDictionary[types.CodeType, tuple[str, ...]] = weakref.WeakKeyDictionary()


def take_function(fn: types.FunctionType) -> Taken | None:
    """A function by its code, cell contents and the globals it names. None if it depends on nothing that can change."""
    if is_region(fn):
        return _take_region(fn, *fn.__dict__["__lowtide_parts__"][1:])
    cells, names = fn.__closure__ or (), _changeable_globals(fn)
    defaults = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    if not cells and not names and all(type(value) in _STEADY for value in defaults):
        return None
    table = fn.__globals__
    values = [table[name] for name in names]
    contents = [_content(cell) for cell in cells]
    attributes = [name for name in _names_of(fn.__code__) if name in fn.__dict__]
    box = Box(_maker(fn, len(cells), names, values), _filler(table, len(cells), names, attributes))
    box.code = fn.__code__
    box.labels = [
        *(f" (attribute {name!r} of {fn.__name__})" for name in attributes),
        *(f" (variable {name!r} of {fn.__name__})" for name in (*fn.__code__.co_freevars, *names)),
    ]
    return box, [*(fn.__dict__[name] for name in attributes), *contents, *values, *defaults]


def is_region(fn: types.FunctionType) -> bool:
    """Whether ``checkpoint`` made it, and it is no copy with the attributes of one, as decorators make them."""
    parts = fn.__dict__.get("__lowtide_parts__")
    return parts is not None and parts[0]() is fn


def module_of_region(fn: types.FunctionType) -> nn.Module | None:
    """The module that a region calls, if this is one and calls a module."""
    parts = fn.__dict__.get("__lowtide_parts__")
    return parts[1] if parts is not None and isinstance(parts[1], nn.Module) and parts[0]() is fn else None


def _take_region(fn: types.FunctionType, called: Any, around: Callable[[Any], Any]) -> Taken:
    """What ``checkpoint`` made depends on nothing but what it calls."""
    box = Box(lambda parts: around(parts[0]), None)
    box.code, box.labels, box.steady = fn.__code__, ("",), True
    return box, [called]


def _maker(fn: types.FunctionType, cell_count: int, names: list[str], values: list[Any]) -> Any:
    """Makes the function anew with empty cells; with globals of its own where those that it reads have moved on."""
    code, table, name, defaults = fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__
    keyword_defaults, attributes = dict(fn.__kwdefaults__ or {}), dict(fn.__dict__)
    changeable = any(type(value) in (list, dict, set) for value in values)

    def make(_: list[Any]) -> types.FunctionType:
        moved = changeable or any(table.get(n, _EMPTY) is not value for n, value in zip(names, values, strict=True))
        cells = tuple(types.CellType() for _ in range(cell_count))
        made = types.FunctionType(code, dict(table) if moved else table, name, defaults, cells or None)
        made.__kwdefaults__ = dict(keyword_defaults) or None
        made.__dict__.update(attributes)
        return made

    return make


def _filler(table: dict[str, Any], cell_count: int, names: list[str], attributes: list[str]) -> Any:
    def fill(made: types.FunctionType, parts: list[Any]) -> None:
        made.__dict__.update(zip(attributes, parts, strict=False))
        parts = parts[len(attributes) :]
        for cell, part in zip(made.__closure__ or (), parts, strict=False):
            if part is not _EMPTY:
                cell.cell_contents = part
        if made.__globals__ is not table:
            made.__globals__.update(zip(names, parts[cell_count:], strict=False))
        defaults = parts[cell_count + len(names) :]
        if made.__defaults__:
            made.__defaults__ = tuple(defaults[: len(made.__defaults__)])
        if made.__kwdefaults__:
            made.__kwdefaults__.update(zip(made.__kwdefaults__, defaults[-len(made.__kwdefaults__) :], strict=True))

    return fill


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _changeable_globals(fn: types.FunctionType) -> list[str]:
    table = fn.__globals__
    return [name for name in _names_of(fn.__code__) if name in table and _may_change(table[name])]


def _may_change(value: Any) -> bool:
    if isinstance(value, _PLAIN) or (type(value) is types.FunctionType and value.__closure__ is None):
        return False
    return not isinstance(value, (list, dict, set, tuple)) or len(value) <= _LARGEST_GLOBAL


def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, and code inside it, may look up among the globals."""
    names = _NAMES.get(code)
    if names is None:
        inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names_of(const)]
        names = _NAMES[code] = tuple(dict.fromkeys([*code.co_names, *inner]))
    return names


def take_partial(value: functools.partial[Any]) -> Taken:
    """A partial function: its function and arguments may be anything."""
    return Box(lambda parts: functools.partial(parts[0], *parts[1], **parts[2]), None), [value.func, value.args, value.keywords]


def take_method(value: types.MethodType) -> Taken:
    """A method: its object may be one that is taken apart."""
    function = value.__func__
    return Box(lambda parts: types.MethodType(function, parts[0]), None), [value.__self__]


def parameter_names(target: Any, count: int) -> list[str]:
    """What the user calls the first ``count`` arguments."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return names + [f"argument {index}" for index in range(len(names), count)]
