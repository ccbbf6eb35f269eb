"""One member call of a frame: the callable, its arguments taken apart, and the state that it ran in."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._guards._ambient import set_ambient, take_ambient
from lowtide.engine._guards._modules import Taken, Watch, first_changed
from lowtide.engine._guards._random import set_random, take_random
from lowtide.engine._tree import Place, load, places_in, store

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


class Held(Place):
    """An input of the frame."""

    __slots__ = ("index", "requires_grad")

    def __init__(self, index: int, requires_grad: bool) -> None:
        self.index, self.requires_grad = index, requires_grad


class Made(Place):
    """Tensor ``leaf`` of what member ``call`` returned."""

    __slots__ = ("call", "leaf")

    def __init__(self, call: int, leaf: int) -> None:
        self.call, self.leaf = call, leaf


class Call:
    """How to call a member again.

    Attributes:
        target: the callable.
    """

    __slots__ = ("_ambient", "_args", "_kwargs", "_modules", "_random", "target")

    def __init__(self, frame: Frame, target: Callable[..., Any], watch: Watch | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.target = target
        memo: dict[int, Any] = {}
        keep = frame.keep
        self._args = [store(arg, keep, memo) for arg in args]
        self._kwargs = {name: store(arg, keep, memo) for name, arg in kwargs.items()} if kwargs else {}
        self._modules: tuple[Watch, Taken] | None = None if watch is None else (watch, watch.take())
        self._random = take_random()
        self._ambient = take_ambient()

    def arguments(self, frame: Frame, results: list[list[torch.Tensor]]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments as they were; containers are new ones."""
        memo: dict[int, Any] = {}

        def fetch(place: Place) -> torch.Tensor:
            if isinstance(place, Made):
                return results[place.call][place.leaf]
            assert isinstance(place, Held)
            return frame.fetch_held(place)

        args = [load(stored, fetch, memo) for stored in self._args]
        return args, {name: load(stored, fetch, memo) for name, stored in self._kwargs.items()}

    @contextmanager
    def surroundings(self, region: str) -> Iterator[None]:
        """The state in which the call ran, for its replay; afterwards everything is as it was before."""
        with self._module_state(region), _grad_enabled():
            ambient = set_ambient(self._ambient.for_replay())
            try:
                random = set_random(self._random)
                try:
                    yield
                finally:
                    set_random(random)
            finally:
                set_ambient(ambient)

    @contextmanager
    def _module_state(self, region: str) -> Iterator[None]:
        if self._modules is None:
            yield
            return
        watch, taken = self._modules
        first_changed(region, watch, taken)
        before = watch.put(taken)
        try:
            yield
        finally:
            watch.put(before)

    def run(self, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call it again, with the context variables that it had."""
        return self._ambient.context.copy().run(self.target, *args, **kwargs)

    def names_of(self, place: Place) -> list[str]:
        """What the user calls an argument: ``x``, ``batch[0]``."""
        names = _parameter_names(self.target, len(self._args))
        stored = [*zip(names, self._args, strict=True), *self._kwargs.items()]
        return [path for name, part in stored for path, found in places_in(part, name) if found is place]


def _parameter_names(target: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return names + [f"argument {index}" for index in range(len(names), count)]


@contextmanager
def _grad_enabled() -> Iterator[None]:
    before = torch.is_grad_enabled()
    private.set_grad_enabled(True)
    try:
        yield
    finally:
        private.set_grad_enabled(before)
