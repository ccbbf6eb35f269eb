"""What audits learned about the calls of one piece of code."""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from lowtide.engine._guards._reach import Outside
from lowtide.engine._tree import is_ordinary

if TYPE_CHECKING:
    from lowtide.engine._guards._modules import Watch
    from lowtide.engine._kept._learned import Learned
    from lowtide.engine._steady import Steady


@dataclass(slots=True)
class Script:
    """What one audited call saved for backward, in order. Other calls are taken to go the same way if their ``key`` is the same.

    Attributes:
        grads: whether each saved tensor required gradients.
        trained: of each module that is watched, which of its tensors required gradients.
        ops: the op that each saved tensor belongs to.
        sources: the user's line that called it, ``file.py:12``.
        strides: of each saved tensor.
        positions: how many ops had run when it was saved.
        others: places whose tensor somebody else may keep, so that it need not be made again.
        plain: for each place 0 if it was kept as it is, 1 if it was dropped, 2 if besides it was gone when a replay began.
        late: places whose tensor was filled only after it was saved: a replay must not stop there.
        unread: places whose bits say nothing: the late ones, and work space of recurrent kernels, of which not all is written.
        reach: for each place, the first one after it that cannot belong to the same op: backward asks for what was saved last
            first, so when it asks for a tensor it will not need what comes after.
        stop: for each place, the one at which a replay that needs no more may end.
        end: the same, but larger than any where it had better go on; for replays that run no kept call.
        work: how much each op had to do, about.
        first: the call began where the graph begins: no input was made by something that gradients flow through.
        settled: no user code that cleans up after itself (context managers, hooks) runs once so many were saved.
    """

    ops: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    strides: list[Any] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    grads: list[bool] = field(default_factory=list)
    trained: tuple[tuple[bool, ...], ...] = ()
    plain: list[int] = field(default_factory=list)
    others: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    unread: set[int] = field(default_factory=set)
    work: list[float] = field(default_factory=list)
    first: bool = False
    settled: int = 0
    reach: list[int] = field(default_factory=list)
    stop: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)

    def settle(self) -> None:
        """Work out ``reach``, ``stop``, ``end`` and ``unread``, for a replay to look up."""
        positions = self.positions
        self.unread = self.late | {place for place, op in enumerate(self.ops) if op in _WITH_WORK_SPACE}
        self.reach = [bisect.bisect_right(positions, position + 1) for position in positions]
        for place in range(len(positions)):
            stop = max(place, self.settled)
            unfilled = max((positions[late] for late in self.late if late <= stop), default=-1)
            self.stop.append(max(stop, bisect.bisect_right(positions, unfilled)))
        self.end = [stop if self._is_worth_skipping(stop) else sys.maxsize for stop in self.stop]

    def _is_worth_skipping(self, place: int) -> bool:
        """Whether what comes after a place takes longer than to be thrown out of it, through the frames of autograd and of modules.

        It always does where it saves anything: that is a part of the region of its own, which nobody asked for.
        """
        positions = self.positions
        if place >= len(positions):
            return True
        left = self.work[positions[place] :]
        return self.reach[place] < len(positions) or len(left) > _FEW_OPS or sum(left) > _LITTLE_WORK


_WITH_WORK_SPACE = frozenset({"aten.mkldnn_rnn_layer.default", "aten._cudnn_rnn.default", "aten.miopen_rnn.default"})
_FEW_OPS = 4
_LITTLE_WORK = 1 << 20
_SETTLING = 8
_MOST_FLAGS = 32


@dataclass(slots=True)
class Profile:
    """What is known of a module's forward or a function.

    Attributes:
        number: of no other profile of the process.
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
        transforms: function transforms run inside it, see ``_transforms``.
        unsteady: a replay made other values than its forward, and would again: every call is compared from then on.
        strangers: calls that went a way which no watched call had gone.
        outside: what its code reads from elsewhere.
        meets: it runs modules to which nothing leads beforehand: each call watches them as they begin to run.
        watch: of the module whose forward it is.
        steady: of calls that need little and go the way of the call before.
        told: warnings that were given.
        kept: what policies decided about calls in it, where it has no modules.
    """

    number: int = field(default_factory=itertools.count().__next__)
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
    unsteady: bool = False
    strangers: int = 0
    outside: Outside = field(default_factory=Outside)
    meets: bool = False
    transforms: bool = False
    watch: Watch | None = None
    steady: Steady | None = None
    kept: dict[int, dict[Any, Learned]] = field(default_factory=dict)

    def is_news(self, flags: tuple[Any, ...]) -> bool:
        """Whether no watched call was given these flags, and there are few enough of them for that to matter."""
        return flags not in self.flags and len(self.flags) < _MOST_FLAGS

    def has_met(self, values: list[object]) -> bool:
        """Whether watched calls could reach objects of the types of all of these."""
        for value in values:  # noqa: SIM110 – a generator takes longer
            if is_ordinary(type(value)) and weakref.ref(type(value)) not in self.kinds:
                return False
        return True

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
        weakref.finalize(anchor, _let_go, profile).atexit = False
    return profile


def _let_go(profile: Profile) -> None:
    """What it is of is gone. What is known of its modules leads back to the region and so to the profile, and would keep them alive."""
    profile.steady = profile.watch = None


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
