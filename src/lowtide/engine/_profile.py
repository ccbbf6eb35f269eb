"""What audits learned about the calls of one piece of code."""

from __future__ import annotations

import bisect
import functools
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from lowtide.engine._guards._modules import Watch


@dataclass(slots=True)
class Script:
    """What one audited call saved for backward, in order. Other calls are taken to go the same way if their ``key`` is the same.

    Attributes:
        grads: whether each saved tensor required gradients.
        ops: the op that each saved tensor belongs to.
        sources: the user's line that called it, ``file.py:12``.
        strides: of each saved tensor.
        positions: how many ops had run when it was saved.
        plain: for each place 0 if it was kept as it is, 1 if it was dropped, 2 if besides it was gone when a replay began.
        late: places whose tensor was filled only after it was saved: a replay must not stop there.
        reach: for each place, the first one after it that cannot belong to the same op: backward asks for what was saved last
            first, so when it asks for a tensor it will not need what comes after.
        stop: for each place, the one at which a replay that needs no more may end.
        first: the call began where the graph begins: no input was made by something that gradients flow through.
        settled: no user code that cleans up after itself (context managers, hooks) runs once so many were saved.
    """

    ops: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    grads: list[bool] = field(default_factory=list)
    plain: list[int] = field(default_factory=list)
    late: set[int] = field(default_factory=set)
    first: bool = False
    settled: int = 0
    reach: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)

    def settle(self) -> None:
        """Work out ``reach`` and ``stop``, for a replay to look up."""
        positions = self.positions
        for place, position in enumerate(positions):
            self.reach.append(bisect.bisect_right(positions, position + 1))
            stop = max(place, self.settled)
            unfilled = max((positions[late] for late in self.late if late <= stop), default=-1)
            self.stop.append(max(stop, bisect.bisect_right(positions, unfilled)))


_SETTLING = 8
_MOST_FLAGS = 32


@dataclass(slots=True)
class Profile:
    """What is known of a module's forward or a function.

    Attributes:
        expected: script of the call before.
        scripts: by what a call shows of its way without being watched, see ``Frame.key_of``.
        flags: those that watched calls were given, see ``Call.flags``.
        kinds: types of the objects that watched calls could reach.
        left: calls until the next audit.
        attention: it calls scaled dot product attention, so the choice of backends matters.
        copied: which of its tensor inputs it writes to.
        python_random, numpy_random: it draws from the global generator.
        torch_random: it draws from a generator of torch.
        differentiates: it goes backward through parts of itself.
        strangers: calls that went a way which no watched call had gone.
        watch: of the module whose forward it is.
        told: warnings that were given.
    """

    expected: Script | None = None
    scripts: dict[Any, Script] = field(default_factory=dict)
    left: int = 0
    attention: bool = True
    copied: set[int] = field(default_factory=set)
    python_random: bool = False
    numpy_random: bool = False
    torch_random: bool = False
    differentiates: bool = False
    told: set[str] = field(default_factory=set)
    flags: set[tuple[Any, ...]] = field(default_factory=set)
    kinds: set[weakref.ref[type]] = field(default_factory=set)
    strangers: int = 0
    watch: Watch | None = None

    def is_news(self, flags: tuple[Any, ...]) -> bool:
        """Whether no watched call was given these flags, and there are few enough of them for that to matter."""
        return flags not in self.flags and len(self.flags) < _MOST_FLAGS

    def met_stranger(self) -> None:
        """Watch the next call, or where calls never repeat, one after ever more."""
        self.strangers += 1
        self.left = min(self.left, max(self.strangers - _SETTLING, 0))


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
