"""What ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` have in force; ``None`` leaves it to each call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EARLY_STOP: ContextVar[bool | None] = ContextVar("lowtide_torch_compat_early_stop", default=None)
_DEBUG: ContextVar[bool | None] = ContextVar("lowtide_torch_compat_debug", default=None)


@contextmanager
def _set(variable: ContextVar[bool | None], value: bool | None) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Decide for all regions whose forward runs in this context whether their replay may stop early.

    Args:
        enable: ``True`` stops a replay at the last tensor that backward still needs; ``False`` runs it to its end.
            It overrides the ``early_stop`` of the calls.
    """
    with _set(_EARLY_STOP, enable):
        yield


@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Decide for all regions whose forward runs in this context whether a mismatch lists every op that ran.

    Args:
        enabled: overrides the ``debug`` of the calls; ``None`` leaves it to them.
    """
    with _set(_DEBUG, enabled):
        yield


def early_stop_in_force(asked: bool) -> bool:
    """Whether a region that asked for this stops early."""
    forced = _EARLY_STOP.get()
    return asked if forced is None else forced


def debug_in_force(asked: bool) -> bool:
    """Whether a region that asked for this logs its ops."""
    forced = _DEBUG.get()
    return asked if forced is None else forced
