"""What went wrong when a replay did not do what the forward did.

Found out when it happens, so a run that goes well pays nothing for it: the region is run once more, watched.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from lowtide.engine._replay import Recorder, run_calls, saved_by
from lowtide.engine._sources import user_line
from lowtide.engine._thread import Mismatch, StopReplay, state
from lowtide.engine._tower import tower
from lowtide.engine._values import meta_of
from lowtide.errors import ReplayMismatchError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


def explain_mismatch(frame: Frame, mismatch: Mismatch) -> ReplayMismatchError:
    """The error to raise."""
    name = frame.region.name
    if mismatch.index < 0:
        return ReplayMismatchError(
            f"the replay of region {name!r} drew other random numbers than its forward: another thread drew from the CPU generator "
            "of torch meanwhile. Give threads generators of their own, or draw outside of regions",
            region=name,
        )
    if mismatch.wrote:
        return ReplayMismatchError(
            f"the replay of region {name!r} was about to write in place to one of its inputs, as its forward had not, and was stopped: "
            "most likely a branch that depends on state outside of the region (a global, a counter, a file), which changed in between"
        )
    second = _Second(frame)
    python = random.getstate()
    second.run(frame)
    drew = python != random.getstate() and not frame.calls[0].profile.python_random
    random.setstate(python)
    index = mismatch.index
    had = _had(frame, index)
    op, source = saved_by(frame, index)
    return ReplayMismatchError(
        f"the replay of region {name!r} did not do what its forward did. The first difference is in saved tensor {index} "
        f"of {len(frame.slots)} (the replay saved {len(second.found)}):\n"
        f"  forward: {_told(had)}, {_forward_site(frame, index)}\n"
        f"  replay:  {_told(mismatch.found)}, {second.site(index)}\n"
        f"Most likely {_cause(frame, mismatch, had, drew)}",
        region=name,
        op=op,
        source=source,
    )


def _told(meta: tuple[Any, ...] | None) -> str:
    if meta is None:
        return "no such tensor"
    shape = tuple(meta[0]) if isinstance(meta[0], torch.Size) else meta[0]
    return f"shape {shape}, {str(meta[1]).removeprefix('torch.')}, strides {meta[2]}"


def _had(frame: Frame, index: int) -> tuple[Any, ...] | None:
    """Shape and dtype as this call had them; strides as the last audit saw them, for a call that is not watched skips those."""
    if index >= len(frame.slots):
        return None
    call, ref = frame.call_of(index), frame.slots[index]
    strides = "unknown" if call.script is None else call.script.strides[index - call.first]
    slot = None if ref is None else ref()
    return ("of a tensor kept as it is", "", strides) if slot is None else (slot.shape, slot.dtype, strides)


def _forward_site(frame: Frame, index: int) -> str:
    """Known from the last audit, if this call went the way that was watched."""
    if index >= len(frame.slots):
        return "its forward had come to its end"
    call = frame.call_of(index)
    script, place = call.script, index - call.first
    if script is None:
        return "by an op that is not known, for no call that saved as many tensors has been watched"
    return f"by {script.ops[place]} (op {script.positions[place]}) at {script.sources[place] or 'an unknown line'}"


def _cause(frame: Frame, mismatch: Mismatch, had: tuple[Any, ...] | None, drew: bool) -> str:
    found = mismatch.found
    if mismatch.values:
        return "a kernel that is not deterministic, or a value that the region reads and that changed between forward and backward"
    if drew:
        return "random numbers of Python that no call before had drawn, so that their state was not kept"
    flipped = _flipped(frame)
    if flipped:
        return f"the module {flipped!r}, which was switched between training and evaluation in between"
    if had is not None and found is not None:
        if had[1] != found[1]:
            return "another dtype context: a default dtype, an autocast region or a cast weight that is not the one of the forward"
        if _grew(had[0], found[0]):
            return "a cache or list that the region reads and that grew between forward and backward"
    return "a branch that depends on data or on state outside of the region (a global, a counter, a file), which changed in between"


def _flipped(frame: Frame) -> str:
    for call in frame.calls:
        for watch, taken in call.watches:
            for path, then, now in zip(watch.modules, taken[2], watch.training_now(), strict=False):
                if then != now:
                    return path or "(the region itself)"
    return ""


def _grew(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Size) or not isinstance(other, torch.Size) or len(one) != len(other):
        return False
    return sum(a != b for a, b in zip(one, other, strict=True)) == 1 and one.numel() < other.numel()


class _Second(Recorder):
    """Hooks of the run that is only watched: notes for every saved tensor the op and the user's line."""

    runs_all = True

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame, [None])
        self.found: list[tuple[str, str, tuple[Any, ...]]] = []
        self._last_op = "an op"

    def run(self, frame: Frame) -> None:
        """Run the region; whatever it raises is not what is to be explained."""
        state.depth += 1
        try:
            with tower.watching(self):
                run_calls(frame, self)
        except (Exception, Mismatch, StopReplay):
            return
        finally:
            state.depth -= 1

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """Notes only."""
        return self._note

    def _note(self, tensor: torch.Tensor) -> Any:
        """Note a saved tensor."""
        with tower.silence():
            self.found.append((self._last_op, user_line(sys._getframe(1)), meta_of(tensor)))
            return tensor.detach()

    def site(self, index: int) -> str:
        """Where a tensor was saved."""
        if index >= len(self.found):
            return "its replay had come to its end"
        op, line, _ = self.found[index]
        return f"after {op} at {line or 'an unknown line'}"

    def see_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """Remember the op."""
        self._last_op = str(func)

    def see_result(self, result: Any) -> None:
        """Of no interest."""

    def see_python(self, frame: FrameType, event: str, arg: Any) -> None:
        """Of no interest."""

    def see_compiled(self, frame: FrameType, event: str) -> None:
        """Of no interest."""

    def see_nothing_of_python(self) -> None:
        """Of no interest."""
