"""The one dispatch mode and the one profile function through which all audits of a thread see what runs.

Audits nest as regions do; a mode for each of them would make every op pass through all of them, recursively.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.engine._sources import is_library


class Viewer(Protocol):
    """Is told what runs."""

    def see_op(self, func: Any, args: Any, kwargs: Any) -> None: ...
    def see_result(self, result: Any) -> None: ...
    def see_python(self, frame: FrameType, event: str, arg: Any) -> None: ...
    def see_nothing_of_python(self) -> None: ...


class TowerMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells every viewer of the thread about every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tower.quiet:
            return func(*args, **kwargs)
        with tower.silence():
            for viewer in tower.viewers:
                viewer.see_op(func, args, kwargs)
        result = func(*args, **kwargs)
        with tower.silence():
            for viewer in tower.viewers:
                viewer.see_result(result)
        return result


class Tower(threading.local):
    """The audits of this thread.

    Attributes:
        viewers: innermost last.
        quiet: above zero, lowtide's own ops run: nobody is told.
    """

    def __init__(self) -> None:
        self.viewers: list[Viewer] = []
        self.quiet = 0

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What runs in here is lowtide's own."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    @contextmanager
    def watching(self, viewer: Viewer) -> Iterator[None]:
        """``viewer`` is told of what runs in here."""
        self.viewers.append(viewer)
        try:
            if len(self.viewers) > 1:
                self._note_profiler(viewer)
                yield
            else:
                with TowerMode(), self._profiling(viewer):  # type: ignore[no-untyped-call]
                    yield
        finally:
            self.viewers.pop()

    @contextmanager
    def _profiling(self, viewer: Viewer) -> Iterator[None]:
        if sys.getprofile() is not None:
            viewer.see_nothing_of_python()
            yield
            return
        sys.setprofile(_tell)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note_profiler(self, viewer: Viewer) -> None:
        if sys.getprofile() is not _tell:
            viewer.see_nothing_of_python()


_OUTPUT = frozenset({"print", "write", "writelines"})


def _tell(frame: FrameType, event: str, arg: Any) -> None:
    """Only calls of the user's own functions are of interest, and builtins that write or that compute attention."""
    if event == "call":
        if is_library(frame.f_code.co_filename):
            return
    elif event != "c_call" or (arg.__name__ not in _OUTPUT and "attention" not in arg.__name__):
        return
    if not tower.quiet:
        for viewer in tower.viewers:
            viewer.see_python(frame, event, arg)


tower = Tower()
