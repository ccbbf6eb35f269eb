"""What audits learned about the calls of one piece of code."""

from __future__ import annotations

import functools
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(slots=True)
class Script:
    """What one audited call saved for backward, in order. Another call that saves as many is taken to go the same way.

    Attributes:
        ops: the op that each saved tensor belongs to.
        sources: the user's line that called it, ``file.py:12``.
        positions: how many ops had run when it was saved.
        late: places whose tensor was filled only after it was saved: a replay must not stop there.
        settled: no user code that cleans up after itself (context managers, hooks) runs once so many were saved.
    """

    ops: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    settled: int = 0


@dataclass(slots=True)
class Profile:
    """What is known of a module's forward or a function.

    Attributes:
        scripts: by the number of saved tensors.
        left: calls until the next audit.
        attention: it calls scaled dot product attention, so the choice of backends matters.
        copied: which of its tensor inputs it writes to.
        python_random, numpy_random: it draws from the global generator.
        torch_random: it draws from a generator of torch.
        differentiates: it goes backward through parts of itself.
        told: warnings that were given.
    """

    scripts: dict[int, Script] = field(default_factory=dict)
    left: int = 0
    attention: bool = True
    copied: set[int] = field(default_factory=set)
    python_random: bool = False
    numpy_random: bool = False
    torch_random: bool = False
    differentiates: bool = False
    told: set[str] = field(default_factory=set)


_PROFILES: weakref.WeakKeyDictionary[Any, Profile] = weakref.WeakKeyDictionary()


def profile_of(target: Any) -> Profile:
    """The profile of a callable: by module, by code, or else by type."""
    anchor = _anchor(target)
    profile = _PROFILES.get(anchor)
    if profile is None:
        profile = _PROFILES[anchor] = Profile()
    return profile


def _anchor(target: Any) -> Any:
    if isinstance(target, functools.partial):
        return _anchor(target.func)
    if isinstance(target, types.MethodType):
        return target.__self__ if isinstance(target.__self__, nn.Module) else target.__func__.__code__
    if isinstance(target, types.FunctionType):
        wrapped = getattr(target, "__wrapped__", None)
        return _anchor(wrapped) if isinstance(wrapped, (types.FunctionType, types.MethodType)) else target.__code__
    weak = type(target).__weakrefoffset__ != 0 and type(target).__hash__ is not None
    return target if isinstance(target, nn.Module) or weak else type(target)
