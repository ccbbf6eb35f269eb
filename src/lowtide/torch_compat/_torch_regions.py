"""Looks on while a step calls ``torch.utils.checkpoint``, or has it run as if there was no checkpointing.

``checkpoint`` itself is left alone, for libraries keep it in a ``functools.partial`` on their modules. What is replaced is what it calls
by name, in either form, and wherever else a module holds that under its name.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint

from lowtide import _torch_private as private
from lowtide.engine import without_regions


@dataclass(slots=True)
class TorchRegion:
    """One call of ``torch.utils.checkpoint``.

    Attributes:
        function: what is checkpointed.
        reentrant: in which form.
        debug: its ops are logged one by one, in forward and replay.
        preserve_rng_state: a replay draws what the forward drew.
        recorded: gradients are recorded, so that there will be something to replay.
        inputs_need_gradients: one of the tensors passed directly needs gradients.
        around: the call of ``torch.utils.checkpoint`` that this one is made in.
        replays: how often it was replayed so far.
        replay_s: seconds spent in that.
    """

    function: Callable[..., Any]
    reentrant: bool
    debug: bool
    preserve_rng_state: bool
    recorded: bool
    inputs_need_gradients: bool
    around: TorchRegion | None
    replays: int = 0
    replay_s: float = 0.0


Around = Callable[[TorchRegion, bool], AbstractContextManager[object]]


class _Watch:
    """Notes every call.

    Attributes:
        seen: in order.
        running: those whose forward is under way, innermost last.
    """

    def __init__(self, around: Around) -> None:
        self.around = around
        self.seen: list[TorchRegion] = []
        self.running: list[TorchRegion] = []

    def begin(self, function: Callable[..., Any], args: Any, *, reentrant: bool, debug: bool, preserve: bool) -> TorchRegion:
        needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        around = self.running[-1] if self.running else None
        region = TorchRegion(function, reentrant, debug, preserve, torch.is_grad_enabled(), needed, around)
        self.seen.append(region)
        self.running.append(region)
        return region

    def counted(self, region: TorchRegion, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its replays counted."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if not private.in_backward():
                return function(*args, **kwargs)
            region.replays += 1
            start = time.perf_counter()
            try:
                with self.around(region, True):
                    return function(*args, **kwargs)
            finally:
                region.replay_s += time.perf_counter() - start

        return call


def _nothing(_region: TorchRegion, _replaying: bool) -> AbstractContextManager[object]:
    return nullcontext()


@contextmanager
def torch_regions_seen(around: Around = _nothing) -> Iterator[list[TorchRegion]]:
    """The calls of ``torch.utils.checkpoint`` that are made in this context, those inside replays left out.

    Args:
        around: makes a context for each forward of a call (``False``) and for each replay (``True``).
    """
    watch = _Watch(around)
    with _called_instead(_SeenReentrant(watch), _seen_generator(watch, private.checkpoint_generator())):
        yield watch.seen


class _SeenReentrant:
    """Stands for ``CheckpointFunction``."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Make the call, and note it."""
        if private.in_backward():
            return private.CheckpointFunction.apply(function, preserve, *args)
        region = self._watch.begin(function, args, reentrant=True, debug=False, preserve=preserve)
        try:
            with self._watch.around(region, False):
                return private.CheckpointFunction.apply(self._watch.counted(region, function), preserve, *args)
        finally:
            self._watch.running.remove(region)


def _seen_generator(watch: _Watch, original: Callable[..., Any]) -> Callable[..., Any]:
    """The generator runs around the forward; the function that it is given is what it replays."""

    def surround(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if private.in_backward():
            yield from original(function, *args, **kwargs)
            return
        asked = inspect.signature(original).bind(function, *args, **kwargs)
        asked.apply_defaults()
        given = asked.arguments
        forced = private.checkpoint_debug_forced()
        debug = bool(given.get("debug")) if forced is None else forced
        region = watch.begin(function, given["args"], reentrant=False, debug=debug, preserve=bool(given.get("preserve_rng_state", True)))
        try:
            with watch.around(region, False):
                yield from original(watch.counted(region, function), *args, **kwargs)
        finally:
            watch.running.remove(region)

    return surround


class _NoReentrant:
    """Stands for ``CheckpointFunction``: calls the function and nothing else."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        """Call it."""
        return function(*args)


def _no_generator(*_args: Any, **_kwargs: Any) -> Generator[None, None, None]:
    yield


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """While in this context a step runs plain: no region of lowtide's nor of ``torch.utils.checkpoint``'s is in force."""
    with without_regions(), _called_instead(_NoReentrant, _no_generator):
        yield


@contextmanager
def _called_instead(reentrant: Any, generator: Any) -> Iterator[None]:
    """While in this context, these are called in place of what ``checkpoint`` calls, whoever calls it."""
    swaps = {"CheckpointFunction": reentrant, private.CHECKPOINT_GENERATOR: generator}
    undo = [(module, name, old) for name in swaps for module, old in _holders(name)]
    for module, name, _ in undo:
        setattr(module, name, swaps[name])
    try:
        yield
    finally:
        for module, name, old in undo:
            setattr(module, name, old)


def _holders(name: str) -> list[tuple[ModuleType, Any]]:
    """Modules that hold under this name what ``torch.utils.checkpoint`` does."""
    wanted = getattr(torch_checkpoint, name)
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    ours = (private.__name__, __package__)
    return [(m, wanted) for m in modules if m.__dict__.get(name) is wanted and not m.__name__.startswith(ours)]
