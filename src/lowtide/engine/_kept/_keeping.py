"""Running a region that keeps results of some of its calls, and running it again without those calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowtide import _torch_private as private
from lowtide.engine._clock import clock
from lowtide.engine._kept._finding import Finder
from lowtide.engine._kept._holding import Holding
from lowtide.engine._kept._learned import NOTHING, Choice, Learned
from lowtide.engine._kept._modules import stand_ins
from lowtide.engine._kept._returning import Returning
from lowtide.engine._thread import state

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._finding import Key, Pack
    from lowtide.engine._kept._kept import Kept

_REPLAYING = ("torch.utils.checkpoint", "lowtide.torch_compat")


class Keeping:
    """What one call of a region keeps.

    Attributes:
        learned: what is known of such calls.
        choice: which calls are kept.
        kept: what is held of them.
    """

    __slots__ = ("choice", "kept", "learned")

    def __init__(self, learned: Learned, choice: Choice, kept: dict[Key, Kept]) -> None:
        self.learned = learned
        self.choice = choice
        self.kept = kept

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
            del self.kept[key]

    def returning(self, frame: Frame, pack: Pack, target: Callable[..., Any]) -> Callable[..., Any]:
        """The callable, for a replay under this pack hook."""
        if not self.kept:
            return target
        finder = Returning(frame, self.kept, self.learned, self.choice, pack)

        def call(*args: Any, **kwargs: Any) -> Any:
            return run_finding(finder, target, args, kwargs)

        return call


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
        return learned.choices[-1] if learned.choices else NOTHING
    module = getattr(around, "__module__", "")
    frame.packs_kept = not module.startswith(_REPLAYING)
    return learned.choice_at(state.since if module.startswith("lowtide.engine") else clock.now)


def holding_for(frame: Frame, call: Call, learned: Learned | None, pack: Pack) -> Holding | None:
    """What finds the calls to keep; ``None`` where there are none."""
    choice = NOTHING if learned is None else choice_for(frame, learned)
    return None if learned is None or not choice.indices else Holding(frame, call, learned, choice, pack)


def run_holding(holding: Holding, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the target, and hold the results of calls that are kept. The hook of the finder has to be in force."""
    result = run_finding(holding, target, args, kwargs)
    holding.call.kept = Keeping(holding.learned, holding.choice, holding.kept)
    if not holding.call.audited and holding.calls not in holding.choice.ways:
        holding.call.profile.met_stranger()
    return result


def run_finding(finder: Finder, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the target; the finder is told of its calls."""
    if finder.choice.modules or finder.choice.closed:
        with stand_ins(finder):
            return _run_under(finder, target, args, kwargs)
    around, state.finder = state.finder, finder
    try:
        return _run_under(finder, target, args, kwargs)
    finally:
        state.finder = around


def _run_under(finder: Finder, target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if not finder.choice.functions:
        return target(*args, **kwargs)
    private.push_function_mode(finder)
    try:
        return target(*args, **kwargs)
    finally:
        private.pop_function_mode()
