"""The one dispatch mode and the one profile function through which all audits of a thread see what runs.

Audits nest as regions do; a mode for each of them would make every op pass through all of them, recursively.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lowtide import _torch_compiler as torch_compiler
from lowtide._torch_private import BareDispatchMode
from lowtide.engine._sources import is_library

if TYPE_CHECKING:
    from lowtide.engine._call import Call


class Viewer(Protocol):
    """Is told what runs."""

    def see_op(self, func: Any, args: Any, kwargs: Any) -> None: ...
    def see_result(self, result: Any) -> None: ...
    def see_python(self, frame: FrameType, event: str, arg: Any) -> None: ...
    def see_compiled(self, frame: FrameType, event: str) -> None: ...
    def see_nothing_of_python(self) -> None: ...


class TowerMode(BareDispatchMode):  # type: ignore[no-untyped-call]
    """Tells every viewer of the thread about every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if tower.quiet:
            return _run(func, args, kwargs)
        with tower.silence():
            for viewer in tower.viewers:
                viewer.see_op(func, args, kwargs)
        result = _run(func, args, kwargs)
        with tower.silence():
            for viewer in tower.viewers:
                viewer.see_result(result)
        return result


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op. Those on lists of tensors do not count, under a mode, that they write: autograd would not notice that."""
    if not func._schema.is_mutable or not func._schema.name.startswith(_ON_LISTS):
        return func(*args, **kwargs)
    writes = [alias is not None and alias.is_write for alias in (argument.alias_info for argument in func._schema.arguments)]
    written = [t for arg, write in zip(args, writes, strict=False) if write for t in (arg if isinstance(arg, (list, tuple)) else [arg])]
    versions = [tensor._version for tensor in written]
    result = func(*args, **kwargs)
    for tensor, version in zip(written, versions, strict=True):
        if tensor._version == version:
            torch.autograd.graph.increment_version(tensor)
    return result


_ON_LISTS = ("aten::_foreach", "aten::_fused", "aten::_amp_foreach")


@contextmanager
def uncompiled() -> Iterator[None]:
    """Every op can be seen: what was compiled runs as Python. It saves other tensors then, so its replay has to run in here too."""
    with torch_compiler.off(), TowerMode():  # type: ignore[no-untyped-call]
        yield


class Tower(threading.local):
    """The audits of this thread.

    Attributes:
        viewers: innermost last.
        unwatched: calls of regions that run inside without an audit of their own; innermost last.
        quiet: above zero, lowtide's own ops run: nobody is told.
    """

    def __init__(self) -> None:
        self.viewers: list[Viewer] = []
        self.unwatched: list[Call] = []
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
                with uncompiled(), self._profiling(viewer):
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
    """Only calls of the user's own functions are of interest, their ends, and builtins that write or that compute attention."""
    if event in ("call", "return"):
        if frame.f_code is torch_compiler.entry():
            for viewer in tower.viewers if not tower.quiet else ():
                viewer.see_compiled(frame, event)
            return
        if is_library(frame.f_code.co_filename) or _is_generated(frame):
            return
    elif event != "c_call" or (arg.__name__ not in _OUTPUT and "attention" not in arg.__name__):
        return
    if not tower.quiet:
        for viewer in tower.viewers:
            viewer.see_python(frame, event, arg)


def _is_generated(frame: FrameType) -> bool:
    """Whether it is a method that a decorator wrote for a class of lowtide or torch, which is in no file."""
    return frame.f_code.co_filename == "<string>" and str(frame.f_globals.get("__name__")).startswith(("lowtide.", "torch."))


def is_blind() -> bool:
    """Whether another profiler is at work, so that viewers see nothing of Python."""
    return sys.getprofile() not in (None, _tell)


tower = Tower()
