"""Attributes of anybody's objects, without running code of theirs: a ``__getattr__`` may raise anything, or count."""

from __future__ import annotations

from typing import Any


def own_attribute(value: object, name: str, default: Any = None) -> Any:
    """What an object or its class has by a name, unless only its ``__getattr__`` would know."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default
