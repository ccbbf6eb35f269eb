"""Running a region that keeps results of some of its calls, and running it again without those calls."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide import _torch_private as private
from lowtide.engine._clock import clock
from lowtide.engine._kept._applied import put_applied, take_out_applied
from lowtide.engine._kept._finding import Finder
from lowtide.engine._kept._holding import Holding
from lowtide.engine._kept._kept import NO_RESULT
from lowtide.engine._kept._learned import NOTHING, Choice, Learned, learned_of, table_of
from lowtide.engine._kept._modules import put_stand_ins, take_out_stand_ins
from lowtide.engine._kept._returning import Returning
from lowtide.engine._thread import state

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._finding import Pack
    from lowtide.engine._options import Policy

_REPLAYING = ("torch.utils.checkpoint", "lowtide.torch_compat")


class Keeping:
    """What one call of a region keeps.

    Attributes:
        learned: what is known of such calls.
        choice: which calls are kept.
        kept: what is held of them.
        sites, deep: see ``Holding``.
    """

    __slots__ = ("choice", "deep", "kept", "learned", "sites")

    def __init__(self, holding: Holding) -> None:
        self.learned = holding.learned
        self.choice = holding.choice
        self.kept = holding.kept
        self.sites = holding.sites
        self.deep = holding.deep

    def forget(self, frame: Frame) -> None:
        """Hold nothing: a replay runs every call."""
        for kept in self.kept.values():
            kept.release(frame)
        self.kept.clear()

    def trim(self, frame: Frame) -> None:
        """Nobody will ask for what is held of the last calls: no replay has to go beyond them."""
        needed = _last_needed(frame)
        for key, kept in reversed([*self.kept.items()]):
            if needed >= kept.first + len(kept.origins):
                break
            kept.release(frame)
            if kept.first <= needed:
                kept.results, kept.result = (), NO_RESULT
            else:
                del self.kept[key]

    def returning(
        self, frame: Frame, pack: Pack, count: Callable[[], int], target: Callable[..., Any], stop: int = sys.maxsize
    ) -> Callable[..., Any]:
        """The callable, for a replay under this pack hook, which ends the replay when so many tensors have been saved.

        Args:
            frame: that is replayed.
            pack: the hook.
            count: tells how many tensors it has been handed so far.
            target: the callable.
            stop: at how many the replay ends.
        """
        if not self.kept:
            return target
        finder = Returning(frame, self, pack, count, stop)

        def call(*args: Any, **kwargs: Any) -> Any:
            return run_finding(finder, target, args, kwargs)

        return call


class Course(NamedTuple):
    """What calls that go the way of the call before keep.

    Attributes:
        learned: what is known of such calls.
        choice: which calls are kept.
    """

    learned: Learned
    choice: Choice

    def goes_on(self) -> bool:
        """Whether nothing else was chosen since, and the region itself holds what it keeps."""
        return self.learned.latest is self.choice and private.top_hooks() is None

    def holding(self, frame: Frame, call: Call, pack: Pack) -> Holding | None:
        """What finds the calls to keep; ``None`` where there are none."""
        return Holding(frame, call, self.learned, self.choice, pack) if self.choice.indices else None


def course_of(frame: Frame, call: Call, policy: Policy) -> Course | None:
    """What calls like this one keep; ``None`` where that may differ from one to the next."""
    learned = learned_of(call, policy)
    if learned is None or frame.nested or not call.fixed or table_of(call).get(id(policy)) is None:
        return None
    return Course(learned, learned.latest)


def _last_needed(frame: Frame) -> int:
    for index in range(len(frame.slots) - 1, -1, -1):
        ref = frame.slots[index]
        slot = None if ref is None else ref()
        if slot is not None and slot.value is None:
            return index
    return -1


def choice_for(frame: Frame, learned: Learned) -> Choice:
    """Which calls to keep. Inside another region, of what was chosen by the time when the outermost one was entered."""
    around = frame.around_pack
    if around is None:
        return learned.latest
    module = getattr(around, "__module__", "")
    frame.packs_kept = not module.startswith(_REPLAYING)
    return learned.choice_at(state.since if module.startswith("lowtide.engine") else clock.now)


def holding_for(frame: Frame, call: Call, learned: Learned | None, pack: Pack) -> Holding | None:
    """What finds the calls to keep; ``None`` where there are none."""
    choice = NOTHING if learned is None else choice_for(frame, learned)
    return None if learned is None or not choice.indices else Holding(frame, call, learned, choice, pack)


def run_holding(holding: Holding, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the target, and hold the results of calls that are kept. The hook of the finder has to be in force."""
    asked, state.asked = state.asked, False
    try:
        result = run_finding(holding, target, args, kwargs)
        holding.call.kept = Keeping(holding)
        if state.asked and not holding.deep:
            holding.learned.asks = True
            holding.call.kept.forget(holding.frame)  # a replay may go another way, and whether it does could not be seen
    finally:
        state.asked = state.asked or asked
    if not holding.call.audited and holding.calls() not in holding.choice.ways:
        holding.call.profile.met_stranger()
        holding.learned.look_everywhere()
    return result


def run_finding(finder: Finder, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the target; the finder is told of its calls."""
    choice = finder.choice
    stand_ins = choice.stand_ins
    around, state.finder = state.finder, finder
    if stand_ins:
        put_stand_ins(stand_ins)
    if choice.applied:
        put_applied(choice.applied)
    finder.begin()
    try:
        return target(*args, **kwargs)
    finally:
        finder.end()
        if choice.applied:
            take_out_applied(choice.applied)
        if stand_ins:
            take_out_stand_ins(stand_ins)
        state.finder = around
