"""What a value that was taken apart consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, Protocol


class Labels(Protocol):
    """How to write the way from a container to each of its parts."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> str: ...


class Place:
    """Where a tensor was in the structure."""

    __slots__ = ()


class Box:
    """A container, taken apart.

    Attributes:
        make: makes it, from its parts if ``fill`` is None, else empty.
        fill: puts the parts in; apart from ``make``, for a container may contain itself.
        parts: what was in it, taken apart.
        labels: how errors write the way to a part.
        original: the object itself, where it turned out that the call does not change it.
        code: of a function or method.
        steady: nothing else can be put in it later, so it is passed on as it is where its parts are.
    """

    __slots__ = ("code", "fill", "labels", "make", "original", "parts", "steady")

    def __init__(self, make: Callable[[list[Any]], Any], fill: Callable[[Any, list[Any]], None] | None) -> None:
        self.make = make
        self.fill = fill
        self.parts: list[Any] = []
        self.labels: Labels = ()
        self.original: Any = None
        self.code: CodeType | None = None
        self.steady = False


Taken = tuple[Box, Sequence[Any]]
