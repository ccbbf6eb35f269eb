"""Objects whose state is taken before a call and put back for its replay."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
S = TypeVar("S")

_KINDS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    random.SystemRandom: (lambda _: None, lambda _, __: None),
    random.Random: (lambda r: r.getstate(), lambda r, state: r.setstate(state)),
    np.random.RandomState: (lambda r: r.get_state(), lambda r, state: r.set_state(state)),
    np.random.Generator: (lambda g: g.bit_generator.state, lambda g, state: setattr(g.bit_generator, "state", state)),
}
_LARGEST_ARRAY_BYTES = 1 << 20


def _copy_array(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Larger ones are data, which a region only reads."""
    return array.copy() if array.nbytes <= _LARGEST_ARRAY_BYTES else None


def _put_array(array: np.ndarray[Any, Any], copy: np.ndarray[Any, Any] | None) -> None:
    if copy is not None and array.flags.writeable:
        np.copyto(array, copy)


def _put_environment(variables: Any, wanted: dict[str, str]) -> None:
    for name in [name for name in variables if name not in wanted]:
        del variables[name]
    variables.update(wanted)


_KINDS[type(os.environ)] = (dict, _put_environment)
_KINDS[np.ndarray] = (_copy_array, _put_array)
_FOUND: dict[type, bool] = {}


def register_state(kind: type[T], take: Callable[[T], S], restore: Callable[[T, S], object]) -> None:
    """Say how to take and restore the state of objects that regions change.

    A region that can reach such an object (as an argument, in a container, closure or module attribute) takes its state
    when it is entered. For a replay that state is restored, and afterwards the state from before the replay.

    Built in are random generators of torch, NumPy and Python, and the caches of transformers. Lists, dicts, sets, deques and
    dataclasses need none of this, and neither do other objects made of attributes: a replay gets a copy of them as they were.

    Args:
        kind: the type; subclasses are included.
        take: returns a snapshot that later changes of the object leave alone.
        restore: puts a snapshot back into the object.
    """
    _KINDS[kind] = (take, restore)
    _FOUND.clear()
    from lowtide.engine import _tree

    for known in [known for known in _tree._TAKERS if issubclass(known, kind)]:
        del _tree._TAKERS[known]


def has_state(kind: type) -> bool:
    """Whether objects of this type are of a registered one."""
    known = _FOUND.get(kind)
    if known is None:
        known = _FOUND[kind] = any(base in _KINDS for base in kind.__mro__)
    return known


def _functions_of(value: object) -> tuple[Callable[[Any], Any], Callable[[Any, Any], object]]:
    return next(_KINDS[base] for base in type(value).__mro__ if base in _KINDS)


def take_state(value: object) -> Any:
    """Snapshot of an object of a registered type."""
    return _functions_of(value)[0](value)


def put_state(value: object, state: Any) -> None:
    """Put a snapshot back."""
    _functions_of(value)[1](value, state)
