"""Iterators that a step draws its data from, made to give the same items again.

Most iterators can be neither copied nor set back. One that has to be is replaced, where the step finds it, by one that remembers.
"""

from __future__ import annotations

import copy
import io
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lowtide.trace._random import random_bytes, random_state


@dataclass(frozen=True, slots=True)
class _Item:
    """What an iterator gave.

    Attributes:
        value: a copy, before the step could change it.
        before: the random state before it was drawn.
        after: puts the random state to what it was then; ``None`` where drawing it drew no random numbers.
    """

    value: Any
    before: bytes
    after: list[Callable[[], object]] | None

    def given(self) -> Any:
        """The value; random numbers count as drawn, as they were the first time."""
        if self.after is not None and random_bytes() == self.before:
            for restore in self.after:
                restore()
        return _copied(self.value)


class Again(Iterator[Any]):
    """Gives what an iterator gave since a snapshot, each time it is rewound, and then goes on with the iterator itself.

    Items are remembered for as long as the snapshot is.

    Args:
        source: the iterator.
        snapshot: what this is a part of.
    """

    def __init__(self, source: Iterator[Any], snapshot: object) -> None:
        self._source, self._snapshot = source, weakref.ref(snapshot)
        self._items: deque[_Item] = deque()
        self._at = 0

    def rewound(self) -> Again:
        """This, from its beginning."""
        self._at = 0
        return self

    def __next__(self) -> Any:
        if self._snapshot() is None:  # nothing is asked for twice any more
            while self._at:
                self._at -= 1
                self._items.popleft()
            return self._items.popleft().given() if self._items else next(self._source)
        if self._at < len(self._items):
            self._at += 1
            return self._items[self._at - 1].given()
        before = random_bytes()
        value = next(self._source)
        self._items.append(_Item(_copied(value), before, random_state() if random_bytes() != before else None))
        self._at += 1
        return value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # among them those of an instance that is being copied and has no source yet
            raise AttributeError(name)
        return getattr(self._source, name)


def can_be_drawn_from(value: object) -> bool:
    """Whether a value gives items one by one and is no file."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of whatever type users' classes raise: shared is better than none
        return value
