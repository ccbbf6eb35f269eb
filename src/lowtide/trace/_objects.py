"""Finding objects through the garbage collector: tensors and optimizers, which nobody keeps a list of.

To look at every object there is takes longer than many a step. So a look is remembered: as long as the collector has moved nothing into
its oldest generation since, what is new is in the younger ones.
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

_KINDS = (torch.Tensor, Optimizer)


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

    def again(self) -> list[Any]:
        """All that are alive now."""
        moved = _what_ages_objects()
        if moved == self._moved:
            old = [each for each in (ref() for ref in self._seen) if each is not None]
            found = list({id(each): each for each in [*old, *_instances(0), *_instances(1)]}.values())
        if moved != self._moved or _what_ages_objects() != moved:  # the collector may run in the midst of a look at the younger ones
            moved, found = _what_ages_objects(), _instances(None)
        self._seen = [weakref.ref(each) for each in found]
        self._moved = _what_ages_objects() if gc.get_freeze_count() else moved  # a look at frozen objects moves them
        return found


def _what_ages_objects() -> object:
    """Changes whenever the collector moves objects into its oldest generation, or out of all."""
    _, *older = gc.get_stats()
    return [generation["collections"] for generation in older], gc.get_freeze_count()


def _instances(generation: int | None) -> list[Any]:
    """Every tensor and optimizer in a generation of the collector, or in all."""
    everything = _all_objects() if generation is None else gc.get_objects(generation)
    # By type: isinstance may run code of lazy objects. No loop in Python, for there are hundreds of thousands of objects.
    return list(compress(everything, map(_with_subclasses(_KINDS).__contains__, map(type, everything))))


def _all_objects() -> list[Any]:
    """Everything that the collector knows, what was frozen included.

    It lists nothing frozen, so it is thawed for the look. Freezing it again takes in all that is there, so garbage is collected first.
    """
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.collect()
    gc.unfreeze()
    everything = gc.get_objects()
    gc.freeze()
    return everything


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
