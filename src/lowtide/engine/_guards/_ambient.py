"""State that surrounds a call without being passed to it: contexts, modes, defaults, autocast.

Reading all of it costs about a microsecond, so it is always read; at replay only what differs by then is set.
"""

from __future__ import annotations

import contextvars
from typing import Any

import torch

from lowtide import _torch_compiler as torch_compiler
from lowtide import _torch_private as private
from lowtide.engine._acceleration import native
from lowtide.engine._kept._between import Between
from lowtide.engine._tower import TowerMode

_DEVICE_TYPES: list[str] = []
_get_flash, _get_efficient, _get_math, _get_cudnn = (get for get, _ in private.attention_flags)
_PUT_ATTENTION = tuple(put for _, put in private.attention_flags)

# context, default dtype, function modes, dispatch modes, autocast, attention backends, their order, parametrized weights that are
# computed once, what compiles functions as they are called
Ambient = tuple[
    contextvars.Context,
    torch.dtype,
    tuple[Any, ...],
    tuple[Any, ...],
    Any,
    tuple[bool, ...],
    list[int] | None,
    private.ComputedWeights,
    Any,
]


def take_ambient(attention: bool, *, whole: bool = False) -> Ambient:
    """Read the state of this thread.

    Args:
        attention: read the choice of attention backends as well, which only some regions need.
        whole: read autocast's settings also while it is off, since they are to be put back.
    """
    return (
        contextvars.copy_context(),
        torch.get_default_dtype(),
        _function_modes() if private.function_mode_count() else (),
        _dispatch_modes() if private.dispatch_mode_count() else (),
        _take_autocast() if whole or private.any_autocast() else None,
        (_get_flash(), _get_efficient(), _get_math(), _get_cudnn()) if attention else (),
        private.attention_order() if attention else None,
        private.computed_weights(),
        torch_compiler.current(),
    )


def is_in_force(wanted: Ambient) -> bool:
    """Whether the thread is in this state already, as it is almost always; but for context variables."""
    _, dtype, functions, dispatches, autocast, attention, order, weights, compiler = wanted
    if weights is not private.computed_weights() or compiler is not torch_compiler.current():
        return False
    if functions or dispatches or autocast or private.any_autocast() or private.function_mode_count() or private.dispatch_mode_count():
        return False
    if torch.get_default_dtype() is not dtype:
        return False
    if order is None:
        return True
    return attention == (_get_flash(), _get_efficient(), _get_math(), _get_cudnn()) and private.attention_order() == order


surroundings: Any = None
"""The compiled form of ``is_in_force`` and of what ``take_ambient`` tells most often; ``None`` where nothing is compiled."""
if native is not None:
    _getters = (
        *(torch_compiler.current, private.any_autocast, private.function_mode_count, private.dispatch_mode_count),
        *(torch.get_default_dtype, private.attention_order, _get_flash, _get_efficient, _get_math, _get_cudnn),
    )
    surroundings = native.Surroundings(_getters, *private.WEIGHTS_ARE_COMPUTED, private.NO_WEIGHTS)
    is_in_force = surroundings.are


def _function_modes() -> tuple[Any, ...]:
    """The stack without lowtide's own modes."""
    return tuple(mode for mode in private.function_modes() if not isinstance(mode, Between))


def _dispatch_modes() -> tuple[Any, ...]:
    """The stack without lowtide's own mode, which watches a forward and has no business in a replay."""
    return tuple(mode for mode in private.dispatch_modes() if type(mode) is not TowerMode)


def set_ambient(wanted: Ambient, before: Ambient) -> None:
    """Make ``wanted`` the state of the thread, which is ``before``; but for context variables, in which one runs."""
    _, dtype, functions, dispatches, autocast, attention, order, weights, compiler = wanted
    if before[1] != dtype:
        torch.set_default_dtype(dtype)
    if before[2] != functions:
        private.set_function_modes(functions)
    if before[3] != dispatches:
        private.set_dispatch_modes(dispatches)
    if before[4] != autocast:
        _set_autocast(autocast)
    if before[5] != attention:
        for put, flag in zip(_PUT_ATTENTION, attention, strict=True):
            put(flag)
    if before[6] != order and order is not None:
        private.set_attention_order(order)
    if before[7] is not weights:
        private.set_computed_weights(weights)
    if before[8] is not compiler:
        torch_compiler.set_current(compiler)


def for_replay(then: Ambient, now: Ambient) -> Ambient:
    """What a replay runs in: the state of its forward, but for what is none of the forward's business.

    Without autocast's weight cache, for code outside would pick up the casts that a replay puts there; and with the modes of the
    backward that measure what runs, outside of all others.
    """
    autocast = None if then[4] is None else (False, *then[4][1:])
    measuring = tuple(mode for mode in now[3] if private.is_measuring(mode) and all(mode is not known for known in then[3]))
    return (*then[:3], (*measuring, *then[3]), autocast, *then[5:])


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
