"""State that surrounds a call without being passed to it: contexts, modes, defaults, autocast.

Reading all of it costs about a microsecond, so it is always read; at replay only what differs by then is set.
"""

from __future__ import annotations

import contextvars
from typing import Any, NamedTuple

import torch

from lowtide import _torch_private as private

_DEVICE_TYPES: list[str] = []


class Ambient(NamedTuple):
    """The state at one moment.

    Attributes:
        context: context variables.
        settings: default dtype, deterministic algorithms, matmul precision and the attention backends allowed.
        attention_order: in which order attention backends are tried.
        function_modes, dispatch_modes: stacks, innermost last. The default device is a function mode.
        autocast: by device type, whether it is on and its dtype; ``None`` when it is off everywhere.
    """

    context: contextvars.Context
    settings: tuple[Any, ...]
    attention_order: list[int]
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[Any, ...]
    autocast: tuple[Any, ...] | None

    def for_replay(self) -> Ambient:
        """The same without the weight cache: code outside would pick up the casts that a replay puts there."""
        return self if self.autocast is None else self._replace(autocast=(False, *self.autocast[1:]))


_get_flash, _get_efficient, _get_math, _get_cudnn = (get for get, _ in private.attention_flags)
_SETTERS = (
    torch.set_default_dtype,
    torch.use_deterministic_algorithms,
    torch.set_float32_matmul_precision,
    *(put for _, put in private.attention_flags),
)


def take_ambient() -> Ambient:
    """Read the state of this thread."""
    return Ambient(
        contextvars.copy_context(),
        (
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            _get_flash(),
            _get_efficient(),
            _get_math(),
            _get_cudnn(),
        ),
        private.attention_order(),
        private.function_modes() if private.function_mode_count() else (),
        private.dispatch_modes() if private.dispatch_mode_count() else (),
        _take_autocast() if private.any_autocast() else None,
    )


def set_ambient(wanted: Ambient) -> Ambient:
    """Make this the state of the thread, but for context variables; returns the state before."""
    before = take_ambient()
    if before.settings != wanted.settings:
        for put, old, new in zip(_SETTERS, before.settings, wanted.settings, strict=True):
            if old != new:
                put(new)
    if before.attention_order != wanted.attention_order:
        private.set_attention_order(wanted.attention_order)
    if before.function_modes != wanted.function_modes:
        private.set_function_modes(wanted.function_modes)
    if before.dispatch_modes != wanted.dispatch_modes:
        private.set_dispatch_modes(wanted.dispatch_modes)
    if before.autocast != wanted.autocast:
        _set_autocast(wanted.autocast)
    return before


def _device_types() -> list[str]:
    if not _DEVICE_TYPES:
        accelerator = torch.accelerator.current_accelerator()
        _DEVICE_TYPES.extend(dict.fromkeys(["cpu", *([accelerator.type] if accelerator is not None else [])]))
    return _DEVICE_TYPES


def _take_autocast() -> tuple[Any, ...]:
    kinds = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _device_types())
    return (torch.is_autocast_cache_enabled(), *kinds)


def _set_autocast(wanted: tuple[Any, ...] | None) -> None:
    if wanted is None:
        for kind in _device_types():
            torch.set_autocast_enabled(kind, False)
        return
    cache, *kinds = wanted
    torch.set_autocast_cache_enabled(cache)
    for kind, on, dtype in kinds:
        torch.set_autocast_enabled(kind, on)
        torch.set_autocast_dtype(kind, dtype)
