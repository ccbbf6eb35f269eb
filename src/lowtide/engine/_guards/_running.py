"""Modules as they begin to run, whichever way they were reached.

From the code alone it cannot always be told which modules a call will run: one may come out of a context variable, a weak reference,
a table with computed keys. Who has to know hears of each from a hook of all modules, which is there only while somebody listens:
with it, each call of a module takes a microsecond or two longer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lowtide.engine._thread import is_replaying

Listener = Callable[[nn.Module], None]


class _Thread(threading.local):
    """Who listens in this thread."""

    def __init__(self) -> None:
        self.listeners: list[Listener] = []


class _Hook:
    """The hook, for as long as any thread needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._handle: RemovableHandle | None = None

    def hold(self) -> None:
        with self._lock:
            self._users += 1
            if self._handle is None:
                self._handle = register_module_forward_pre_hook(_tell)

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users and self._handle is not None:
                self._handle.remove()
                self._handle = None


class heard_by:  # noqa: N801 – used as a function; as a class it takes half the time
    """While this is entered, ``listener`` is told of each module that begins to run in this thread; not of those that replays run again."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __enter__(self) -> None:
        _thread.listeners.append(self._listener)
        _hook.hold()

    def __exit__(self, *_: object) -> None:
        _hook.let_go()
        _thread.listeners.pop()


def _tell(module: nn.Module, _: Any) -> None:
    if is_compiling():  # the compiler reads this once for all calls; who listens was told of the module that it compiles
        return
    if _thread.listeners and not is_replaying():
        for listener in _thread.listeners:
            listener(module)


_thread = _Thread()
_hook = _Hook()
