"""Compiled code inside a region that keeps results of calls: what it calls is not looked at, nor looked through by the compiler."""

from __future__ import annotations

from collections.abc import Callable

from lowtide import _torch_private as private
from lowtide.engine._thread import state


def finder_left_aside() -> Callable[[], None]:
    """Compiled code is entered: leave what finds kept calls aside. What is returned puts it back."""
    finder = state.finder
    if finder is None:
        return _nothing
    modes = private.function_modes() if private.function_mode_count() else ()
    others = tuple(mode for mode in modes if mode is not finder)
    state.finder = None
    if len(others) != len(modes):
        private.set_function_modes(others)

    def put_back() -> None:
        state.finder = finder
        if len(others) != len(modes):
            private.set_function_modes(modes)

    return put_back


def _nothing() -> None:
    """Nothing was left aside."""
