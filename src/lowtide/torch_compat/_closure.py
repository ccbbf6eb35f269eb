"""A function's captured variables, as they were when it was called.

A lambda made in a loop reads the loop variable when it runs, and by backward that is another layer. What the call itself assigns
(``nonlocal count; count += 1``) is left alone: code that counts its replays relies on it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

_EMPTY = object()


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _weakly(value: object) -> Callable[[], object]:
    """Cells may later be given the region's own output: holding that would be a cycle through autograd's nodes."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


class Captured:
    """What a function's closure held at one moment.

    Args:
        fn: the function; anything else has no closure and is returned as it is.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        cells = fn.__closure__ if isinstance(fn, types.FunctionType) else None
        self._before = [_weakly(_content(cell)) for cell in cells or ()]

    def forward_done(self) -> None:
        """Forget the variables that the call assigned itself."""
        self._before = [
            (lambda: None) if before() is not _content(cell) else before for before, cell in zip(self._before, self._cells(), strict=True)
        ]

    def function(self) -> Callable[..., Any]:
        """The function with the variables that it had."""
        moved = {index: before() for index, before in enumerate(self._before)}
        cells = self._cells()
        wanted = [moved[i] is not None and moved[i] is not _content(cell) for i, cell in enumerate(cells)]
        if not any(wanted):
            return self._fn
        fn = self._fn
        assert isinstance(fn, types.FunctionType)
        closure = tuple(types.CellType(moved[i]) if other else cell for i, (cell, other) in enumerate(zip(cells, wanted, strict=True)))
        again = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, closure)
        again.__kwdefaults__ = fn.__kwdefaults__
        return again

    def _cells(self) -> tuple[types.CellType, ...]:
        return (self._fn.__closure__ or ()) if isinstance(self._fn, types.FunctionType) else ()
