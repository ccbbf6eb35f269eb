"""Stand-ins for ``module.forward`` of modules whose results are kept, while regions run that keep them.

What stands in is an attribute of the module *instance*, as an installed region is. It is put there when the first region that needs it
begins, on whichever thread, and taken out when the last is over, so that between steps nothing of the module is changed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.engine._thread import state

if TYPE_CHECKING:
    from lowtide.engine._kept._finding import Finder

_lock = threading.RLock()


class _StandIn:
    """Tells the finder of the region that runs in this thread of the call."""

    def __init__(self, module: nn.Module, before: Callable[..., Any] | None) -> None:
        self.module = weakref.ref(module)
        self.before = before
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        run = self.before or type(module).forward.__get__(module)
        finder: Finder | None = state.finder
        if finder is None:
            return run(*args, **kwargs)
        if id(module) in finder.choice.closed:
            return finder.run_closed(module, run, args, kwargs)
        return finder.module_called(module, run, args, kwargs)


def _put(module: nn.Module) -> None:
    before = module.__dict__.get("forward")
    if not isinstance(before, _StandIn):
        module.__dict__["forward"] = before = _StandIn(module, before)
    before.users += 1


def _take_out(module: nn.Module) -> None:
    there = module.__dict__.get("forward")
    if isinstance(there, _StandIn):
        there.users -= 1
        if not there.users:
            del module.__dict__["forward"]
            if there.before is not None:
                module.__dict__["forward"] = there.before


@contextmanager
def stand_ins(finder: Finder) -> Iterator[None]:
    """In here the finder is told of calls of modules that are ever kept."""
    refs = {**finder.choice.modules, **finder.choice.closed}.values()
    modules = [module for module in [ref() for ref in refs] if module is not None]
    around, state.finder = state.finder, finder
    _each(_put, modules)
    try:
        yield
    finally:
        _each(_take_out, modules)
        state.finder = around


def _each(do: Callable[[nn.Module], None], modules: Iterable[nn.Module]) -> None:
    with _lock:
        for module in modules:
            do(module)
