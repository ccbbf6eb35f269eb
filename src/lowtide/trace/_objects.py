"""Finding objects through the garbage collector: tensors and optimizers, which nobody keeps a list of.

To look at every object there is takes longer than many a step. So a look is remembered: as long as the collector has moved nothing into
its oldest generation since, what is new is in the younger ones.

What the collector was told to leave out (``gc.freeze``) it does not list. It is thawed for a look, and all that is there then is frozen
again with it, which keeps garbage of cycles for ever. So that is done once for each time that somebody freezes, not for each look.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class _Witness:
    """Made when everything there was had been frozen. The collector lists it until somebody freezes again."""


_KINDS = (torch.Tensor, Optimizer, _Witness)


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that a Python object stands for."""
    return [each for each in _last_look.again() if issubclass(type(each), torch.Tensor)]


def find_optimizers(model: nn.Module) -> list[Optimizer]:
    """The optimizers alive in this process that update a parameter of ``model``."""
    return live_tensors_and_optimizers(model)[1]


def live_tensors_and_optimizers(model: nn.Module) -> tuple[list[torch.Tensor], list[Optimizer]]:
    """Every tensor that a Python object stands for, and the optimizers of ``model``."""
    found = _last_look.again()
    return [each for each in found if issubclass(type(each), torch.Tensor)], _updating(model, found)


class _Look:
    """The tensors and optimizers that were seen last."""

    def __init__(self) -> None:
        self._seen: list[weakref.ref[Any]] = []
        self._moved: object = None
        self._frozen: list[weakref.ref[Any]] = []
        self._witness: _Witness | None = None

    def again(self) -> list[Any]:
        """All that are alive now."""
        moved = _what_ages_objects()
        if moved == self._moved:
            found = _each_once([*_alive(self._seen), *_instances(0), *_instances(1)])
        if moved != self._moved or _what_ages_objects() != moved:  # the collector may run in the midst of a look at the younger ones
            moved, found = _what_ages_objects(), self._all()
        self._seen = [weakref.ref(each) for each in found]
        self._moved = moved
        return found

    def _all(self) -> list[Any]:
        found = _instances(None)
        if not gc.get_freeze_count():
            return found
        if any(each is self._witness for each in found):
            return _each_once([*_alive(self._frozen), *found])
        gc.unfreeze()
        gc.collect()  # garbage would be frozen with the rest
        found = _instances(None)
        gc.freeze()
        self._frozen, self._witness = [weakref.ref(each) for each in found], _Witness()
        return found


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [each for each in (ref() for ref in refs) if each is not None]


def _each_once(found: Iterable[Any]) -> list[Any]:
    return list({id(each): each for each in found}.values())


def _what_ages_objects() -> object:
    """Changes whenever the collector moves objects into its oldest generation, or out of all."""
    _, *older = gc.get_stats()
    return [generation["collections"] for generation in older], gc.get_freeze_count()


def _instances(generation: int | None) -> list[Any]:
    """Every tensor and optimizer in a generation of the collector, or in all."""
    everything = gc.get_objects(generation)
    # By type: isinstance may run code of lazy objects. No loop in Python, for there are hundreds of thousands of objects.
    return list(compress(everything, map(_with_subclasses(_KINDS).__contains__, map(type, everything))))


def _with_subclasses(kinds: Iterable[type]) -> set[type]:
    found: set[type] = set(kinds)
    new = list(kinds)
    while new:
        more: set[type] = set(type.__subclasses__(new.pop())) - found
        found |= more
        new += more
    return found


def _updating(model: nn.Module, candidates: Iterable[Any]) -> list[Optimizer]:
    found = [o for o in candidates if issubclass(type(o), Optimizer) and hasattr(o, "param_groups")]
    owned = {id(parameter) for parameter in model.parameters()} if found else set()
    return [optimizer for optimizer in found if any(id(p) in owned for group in optimizer.param_groups for p in group["params"])]


_last_look = _Look()
