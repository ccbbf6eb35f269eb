"""What is in the tables of modules, and the versions of tensors: read for every region of every step, so in few steps."""

from __future__ import annotations

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from lowtide.engine._acceleration import native

Table = dict[Any, Any]

_versions = attrgetter("_version")
UNREAD = -2
"""In the place of a version, of a tensor for whose values nobody has any use."""


def values_of(tables: list[Table], sizes: list[int]) -> list[Any] | None:
    """All values in some dictionaries, in order; ``None`` if they are not of these sizes."""
    return [*chain.from_iterable(map(dict.values, tables))] if [*map(len, tables)] == sizes else None


def same_values(tables: list[Table], sizes: list[int], values: list[Any], skipped: list[int]) -> bool:
    """Whether these very objects are in some dictionaries of these sizes, in order.

    Args:
        skipped: places, ascending, at which there may be another one.
    """
    now = values_of(tables, sizes)
    if now is None or len(now) != len(values):
        return False
    for place in skipped:
        now[place] = values[place]
    return all(map(is_, now, values))


def versions_of(tensors: list[Any]) -> list[int]:
    """How often each tensor was written to; -1 where there is none, as in the place of a bias that a layer goes without.

    Raises:
        RuntimeError: one of them is of inference mode, and has no version.
    """
    try:
        return [*map(_versions, tensors)]
    except AttributeError:
        return [-1 if tensor is None else _versions(tensor) for tensor in tensors]


def are_versions(tensors: list[Any], versions: list[int]) -> bool:
    """Whether ``versions_of`` would tell these, but for those that are ``UNREAD``.

    Raises:
        RuntimeError: as ``versions_of`` does.
    """
    now = versions_of(tensors)
    return len(now) == len(versions) and all(then in (version, UNREAD) for version, then in zip(now, versions, strict=True))


Settled: Any = None if native is None else native.Settled
"""Dictionaries to which nothing has happened since it was made, and what is in them; ``None`` where that takes comparing contents."""

if native is not None:
    values_of, same_values = native.values_of, native.same_values
    versions_of, are_versions = native.versions_of, native.are_versions
