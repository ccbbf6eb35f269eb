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


def empty_list(_: list[Any]) -> list[Any]:
    """Makes a list that is to be filled."""
    return []


class Held(Place):
    """An input of the frame.

    Attributes:
        index: its place in ``Frame.held``.
        place: its place among all tensors that the member was given.
        version: of the tensor when the call was entered.
        copied: what is held is a copy, for the call writes to the tensor.
        direct: it is held by the frame itself, not by the hooks around the region.
    """

    __slots__ = ("copied", "direct", "index", "place", "requires_grad", "version")

    def __init__(self, index: int, place: int, requires_grad: bool, version: int, copied: bool) -> None:
        self.index = index
        self.place = place
        self.direct = False
        self.requires_grad = requires_grad
        self.version = version
        self.copied = copied


class Made(Place):
    """Tensor ``leaf`` of what member ``call`` returned."""

    __slots__ = ("call", "leaf", "version")

    def __init__(self, call: int, leaf: int, version: int) -> None:
        self.call, self.leaf, self.version = call, leaf, version
