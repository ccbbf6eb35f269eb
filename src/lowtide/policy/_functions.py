"""What can be meant by an op: an overload, a packet of overloads, or a function above them.

A composite function (``F.linear``) never runs below autograd: what runs there are the ops that it is made of. Methods,
operators and functions of one computation have one base name: ``x @ w``, ``x.matmul(w)`` and ``torch.matmul`` are the same.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from lowtide.errors import InvalidInputError

_ROOTS: dict[str, Any] = {"F": torch.nn.functional, "torch": torch, "Tensor": torch.Tensor}
_FORMS = "write an op such as 'aten.mm' or 'aten.mm.default', a function such as 'F.linear' or torch.matmul, or 'package.module:function'"


def canonical(target: Any) -> str | Callable[..., Any]:
    """An op as its name, ``aten.mm`` or ``aten.mm.default``; a function as itself.

    Raises:
        InvalidInputError: it is neither, or there is no op or function of this name.
    """
    if isinstance(target, OpOverload):
        return str(target)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name).replace("::", ".")
    if isinstance(target, HigherOrderOperator):
        return str(target)
    if isinstance(target, str):
        return _named(target.removeprefix("torch.ops."))
    if callable(target):
        function: Callable[..., Any] = target
        return function
    raise InvalidInputError(f"{target!r} is no op and no function: {_FORMS}")


def _named(name: str) -> str | Callable[..., Any]:
    if ":" in name:
        found: Callable[..., Any] = load(name)
        return found
    root, *path = name.split(".")
    if root in _ROOTS and path:
        return _attribute(_ROOTS[root], path, name)
    if not path:
        raise InvalidInputError(f"there is no op {name!r}: {_FORMS}")
    if root == "aten" and "*" not in name:
        _check_aten(name, path)
    return name


def _attribute(owner: Any, path: list[str], name: str) -> Callable[..., Any]:
    for part in path:
        if not hasattr(owner, part):
            raise InvalidInputError(f"there is no function {name!r}{close(part, dir(owner))}")
        owner = getattr(owner, part)
    return owner  # type: ignore[no-any-return]


def _check_aten(name: str, path: list[str]) -> None:
    packet = getattr(torch.ops.aten, path[0], None)
    if packet is None:
        known = [schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
        raise InvalidInputError(f"torch has no op {name!r}{close(path[0], sorted(set(known)))}")
    if len(path) > 1 and path[1] not in packet.overloads():
        raise InvalidInputError(f"torch has no overload {name!r}; aten.{path[0]} has {', '.join(packet.overloads())}")


def close(wanted: str, known: list[str]) -> str:
    """What it may have been meant to be, as the end of a sentence; empty if nothing is near."""
    found = get_close_matches(wanted, known, n=3, cutoff=0.5)
    return f": did you mean {' or '.join(found)}?" if found else ""


def load(name: str) -> Any:
    """The object that ``dump`` wrote as ``module:name``. Reading a file imports nothing: its module must be loaded.

    Raises:
        InvalidInputError: it is not there.
    """
    place, _, path = name.partition(":")
    module = sys.modules.get(place) or (importlib.import_module(place) if place.split(".")[0] == "torch" else None)
    if module is None:
        raise InvalidInputError(f"{name!r} is in a module that is not imported: import {place} first")
    return _attribute(module, path.split("."), name)


def dump(value: Any) -> str:
    """An object as ``module:name``.

    Raises:
        InvalidInputError: it cannot be found again by that name, as a lambda cannot.
    """
    for place, path in _places(value):
        try:
            found = load(f"{place}:{path}")
        except InvalidInputError:
            continue
        if found is value or found == value:
            return f"{place}:{path}"
    raise InvalidInputError(f"{value!r} has no name under which it could be found again, so it cannot be written as JSON")


def _places(value: Any) -> list[tuple[str, str]]:
    name = getattr(value, "__qualname__", "")
    own = [(value.__module__, name)] if getattr(value, "__module__", None) else []
    short = getattr(value, "__name__", "")
    return [*own, ("torch", short), ("torch.nn.functional", short), ("torch", f"Tensor.{short}")]


def base_name(function: Any) -> str:
    """The name that functions, methods and operators of one computation share; empty for what is not torch's.

    >>> base_name(torch.Tensor.__matmul__), base_name(torch.nn.functional.linear), base_name(torch.Tensor.relu_), base_name(print)
    ('matmul', 'linear', 'relu_', '')
    """
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or getattr(owner, "__module__", None) or ""
    if not module.startswith("torch"):
        return ""
    name = str(getattr(function, "__name__", ""))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def shown(target: Any) -> str:
    """How people write it: ``'aten.mm'``, ``F.linear``."""
    if isinstance(target, str):
        return repr(target)
    name = str(getattr(target, "__qualname__", None) or repr(target))
    if getattr(torch.nn.functional, name, None) is target:
        return f"F.{name}"
    return name.replace("TensorBase", "Tensor").replace("_VariableFunctionsClass", "torch")
