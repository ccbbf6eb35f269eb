"""No key-value cache in training steps of transformers models whose layers are replayed.

Generation needs the keys and values of earlier tokens, training does not, yet ``use_cache`` is on by default: a cache that nobody reads
keeps what the replay is to free. A cache with something in it is left alone, for it is an input: prefix tuning passes what it trains in
one. The engine restores such a cache for the replay.

transformers is found among the loaded modules: where it was not imported, a model cannot be one of its models.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

_TOLD: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class CacheOff:
    """A forward pre-hook of one model.

    Attributes:
        enabled: whether it does anything.
    """

    def __init__(self, model: nn.Module) -> None:
        self.enabled = True
        self._handle = model.register_forward_pre_hook(self, with_kwargs=True)

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """A context in which the model runs as it would without."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def remove(self) -> None:
        """Take it off the model. Doing it again does nothing."""
        self._handle.remove()

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if not (self.enabled and torch.is_grad_enabled()):
            return None
        given = dict(zip(_parameters(type(model)), args, strict=False)) | kwargs
        caches = [name for name, value in given.items() if _is_cache(value)]
        if any(given[name].get_seq_length() for name in caches):
            return None
        asked = given.get("use_cache")
        wanted = bool(caches or asked or (asked is None and getattr(model.config, "use_cache", False)))
        if not wanted:
            return None
        if caches or asked or _has_use_for_one(model):
            _tell_once(model)
        return _replaced(model, args, kwargs, {**dict.fromkeys(caches), "use_cache": False})


def switch_caches_off(model: nn.Module, replayed: Iterable[nn.Module]) -> list[CacheOff]:
    """Have the transformers models in a model run without a key-value cache while gradients are recorded.

    Args:
        model: any module.
        replayed: modules that regions are installed on; models with none of them in it are left as they are.

    Returns:
        What was put on the models, to be removed.
    """
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None:
        return []
    regions = {id(module) for module in replayed}
    found = [module for module in model.modules() if isinstance(module, kind) and "use_cache" in _parameters(type(module))]
    return [CacheOff(module) for module in found if not regions.isdisjoint(map(id, module.modules()))]


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the parameters of its forward, in order."""
    return _names_in(kind.forward)


@lru_cache(maxsize=256)
def _names_in(forward: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)[1:]


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length") and any(base.__module__ == "transformers.cache_utils" for base in type(value).__mro__)


def _has_use_for_one(model: Any) -> bool:
    """Encoders have the setting too, and do nothing about it."""
    config = model.config
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "is_decoder", True) or model.can_generate())


def _replaced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], values: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = _parameters(type(model))[: len(args)]
    positional = (*(values.get(name, arg) for name, arg in zip(names, args, strict=False)), *args[len(names) :])
    return positional, {**kwargs, **{name: value for name, value in values.items() if name not in names}}


def _tell_once(model: nn.Module) -> None:
    """Once for a model, and for those inside it."""
    if model in _TOLD:
        return
    _TOLD.update(model.modules())
    warnings.warn(
        f"use_cache is set off in {type(model).__name__} while gradients are recorded: its layers are replayed, and a key-value cache "
        "would keep what the replay is to free. model.config.use_cache = False says the same without this warning",
        stacklevel=2,
    )
