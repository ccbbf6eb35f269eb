"""Puts lowtide's functions in the place of PyTorch's, everywhere that a library holds them.

Libraries do ``from torch.utils.checkpoint import checkpoint``, so it is not enough to change that module: every loaded module
that holds one of the original objects is changed, whatever it calls it. So is every ``functools.partial`` of one: a model on which
checkpointing was switched on before keeps such a thing.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from lowtide.torch_compat import _api, _selective, _settings

_OURS = {
    "checkpoint": _api.checkpoint,
    "checkpoint_sequential": _api.checkpoint_sequential,
    "CheckpointFunction": _api.CheckpointFunction,
    "create_selective_checkpoint_contexts": _selective.create_selective_checkpoint_contexts,
    "set_checkpoint_early_stop": _settings.set_checkpoint_early_stop,
    "set_checkpoint_debug_enabled": _settings.set_checkpoint_debug_enabled,
    "_checkpoint_without_reentrant_generator": _api.checkpoint_without_reentrant_generator,
    "_checkpoint_without_reentrant_generator_impl": _api.checkpoint_without_reentrant_generator_impl,
}
_PAIRS = [(getattr(torch_checkpoint, name), ours) for name, ours in _OURS.items() if hasattr(torch_checkpoint, name)]
_LOCK = threading.Lock()
_depth = 0
_own: set[tuple[str, str]] = set()
"""Names in modules that held lowtide's functions before: they keep them afterwards."""


@contextmanager
def substituted() -> Iterator[None]:
    """Run every library that calls ``torch.utils.checkpoint`` on lowtide's engine.

    What is affected is the call: a region that was entered in this context is replayed by lowtide, also when its backward runs
    outside of it. Contexts may be nested; the outermost puts everything back. It holds for all threads.
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _depth  # noqa: PLW0603  # the process has one set of modules, so there is one depth
    with _LOCK:
        _depth += 1
        if _depth == 1:
            ours = {id(function) for _, function in _PAIRS}
            _own.clear()
            _own.update((m.__name__, name) for m in _modules() for name, value in list(vars(m).items()) if id(value) in ours)
            _replace({id(theirs): (theirs, ours) for theirs, ours in _PAIRS})


def _leave() -> None:
    global _depth  # noqa: PLW0603
    with _LOCK:
        _depth -= 1
        if _depth == 0:
            _replace({id(ours): (ours, theirs) for theirs, ours in _PAIRS})


def _replace(swaps: dict[int, tuple[Any, Any]]) -> None:
    for module in _modules():
        for name, value in list(vars(module).items()):
            old, new = swaps.get(id(value), (None, None))
            if old is not None and old is value and (module.__name__, name) not in _own:
                setattr(module, name, new)
    for partial in _partials_of([old for old, _ in swaps.values()]):
        partial.__setstate__((swaps[id(partial.func)][1], partial.args, partial.keywords, partial.__dict__))  # type: ignore[attr-defined]


def _partials_of(functions: list[Any]) -> list[functools.partial[Any]]:
    found = [value for value in gc.get_referrers(*functions) if isinstance(value, functools.partial)]
    return [partial for partial in found if any(partial.func is function for function in functions)]


def _modules() -> list[ModuleType]:
    loaded = [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]
    return [m for m in loaded if not m.__name__.startswith(("lowtide.torch_compat", "lowtide._torch_private"))]
