"""Running a call again in backward, as far as backward needs it.

The tensors that autograd saves in the replay come in the order in which it saved them in forward, so the place in that
order says which slot one belongs to. As soon as the last slot that backward may want is filled, ``StopReplay`` ends the
replay: it is no ``Exception``, so no handler of the user's own code takes it for an error.
"""

from __future__ import annotations

import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from lowtide import _torch_private as private
from lowtide.engine._slot import Slot
from lowtide.engine._thread import Mismatch, StopReplay, state
from lowtide.engine._tree import tensors_in
from lowtide.engine._values import hash_of, same_hash

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame


_seconds = [0.0]


def replay_seconds() -> float:
    """Seconds that this process has spent in replays, those inside a replay not counted twice."""
    return _seconds[0]


def replay(frame: Frame, wanted: Slot) -> None:
    """Fill ``wanted`` and what else of the frame autograd may ask for next.

    Raises:
        ReplayMismatchError: the region did not do what it did in forward.
        InputChangedError: an input, a parameter or a buffer was modified since.
    """
    frame.check_replayable()
    missing = _missing(frame, wanted)
    started = time.perf_counter()
    state.depth += 1
    try:
        if private.profiler_active():
            with record_function("lowtide::replay"):
                _fill(frame, missing)
        else:
            _fill(frame, missing)
    except Mismatch as mismatch:
        from lowtide.engine._diagnosis import explain_mismatch

        raise explain_mismatch(frame, mismatch) from None
    finally:
        state.depth -= 1
        spent = time.perf_counter() - started
        frame.region.replay_s += spent
        if state.depth == 0:
            _seconds[0] += spent


def _missing(frame: Frame, wanted: Slot) -> dict[int, Slot]:
    """The slots to fill: those that autograd still holds, up to where what follows cannot belong to the op that asked.

    One whose tensor is alive gets that tensor: it may be gone by the time it is asked for.
    """
    missing = {}
    for ref in frame.slots[: _reach(frame, wanted.index)]:
        slot = None if ref is None else ref()
        if slot is not None and slot.value is None:
            original = slot.original()
            if original is None:
                missing[slot.index] = slot
            else:
                slot.put(original)
    return missing


def _reach(frame: Frame, index: int) -> int:
    """Backward asks for what was saved last first: beyond the op that asks there is nothing that it will need."""
    call = frame.call_of(index)
    if call.script is None:
        return len(frame.slots)
    positions = call.script.positions
    end = index - call.first
    limit = positions[end] + 1
    while end < len(positions) and positions[end] <= limit:
        end += 1
    return call.first + end


def _fill(frame: Frame, missing: dict[int, Slot]) -> None:
    """Run once; if the region turns out to go backward through parts of itself, once more with all of it kept meanwhile."""
    recorder = Recorder(frame, missing)
    try:
        run_calls(frame, recorder)
    except _KeepAll:
        frame.calls[0].profile.differentiates = True
        recorder = Recorder(frame, missing)
        run_calls(frame, recorder)
    recorder.check_complete()
    for call in frame.calls:
        for place in () if call.script is None else call.script.late:
            slot = missing.get(call.first + place)
            if slot is not None and slot.value is not None:
                slot.version = slot.value._version


def run_calls(frame: Frame, recorder: Recorder) -> None:
    """Call the members one after the other until the recorder has enough."""
    results: list[list[torch.Tensor]] = []
    last = len(frame.calls) - 1
    for index, call in enumerate(frame.calls):
        target, args, kwargs = call.arguments(frame, results)
        recorder.enter(call)
        private.push_hooks(recorder.pack, recorder.unpack)
        try:
            result = call.run(frame.region.name, target, args, kwargs)
        except StopReplay:
            if not recorder.done and recorder.mismatch is None:
                raise
        finally:
            private.pop_hooks()
        if recorder.done or recorder.mismatch is not None:
            break
        if index != last:
            results.append(tensors_in(result))
    if recorder.mismatch is not None:
        raise recorder.mismatch


class _KeepAll(BaseException):
    """The region goes backward through its own replay: what it saves must be kept while it runs."""


class Recorder:
    """Hooks of a replay: puts what autograd saves into the slots.

    Attributes:
        done: every slot is filled.
        mismatch: the first place at which the replay differs from the forward.
    """

    def __init__(self, frame: Frame, missing: dict[int, Slot]) -> None:
        self.done = False
        self.mismatch: Mismatch | None = None
        self._metas = frame.metas
        self._hashes = frame.hashes
        self._missing = missing
        self._count = 0
        self._last = max(missing)
        self._frame = frame
        self._stop = self._stop_at(frame) if frame.running or frame.region.options.early_stop else -1
        self._keep = frame.running or any(call.profile.differentiates for call in frame.calls)

    def _stop_at(self, frame: Frame) -> int:
        """Where the replay may end: not in code that cleans up after itself, nor before a tensor has its values."""
        call = frame.call_of(self._last)
        if frame.running:
            return self._last
        if call.script is None or any(known.random_end is not None for known in frame.calls):
            return -1
        script, stop = call.script, max(self._last - call.first, call.script.settled)
        unfilled = max((script.positions[place] for place in script.late if place <= stop), default=-1)
        while stop < len(script.positions) and script.positions[stop] <= unfilled:
            stop += 1
        return call.first + stop

    def enter(self, call: Any) -> None:
        """A member is about to be called."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take the next saved tensor of the replay."""
        index = self._count
        self._count = index + 1
        if self.done or self.mismatch is not None:
            return tensor.detach() if self._keep else None
        if index >= len(self._metas) or not _agrees(tensor, self._metas[index]):
            self.mismatch = Mismatch(index, meta_of(tensor))
            raise StopReplay
        if self._hashes is not None and index in self._hashes and not same_hash(hash_of(tensor), self._hashes[index]):
            self._differs(index, tensor)
        slot = self._missing.get(index)
        if slot is not None:
            slot.put(tensor)
        if index >= self._last and index >= self._stop >= 0:
            self.done = True
            raise StopReplay
        return tensor.detach() if self._keep else None

    def unpack(self, packed: Any) -> torch.Tensor:
        """Only a region that goes backward through parts of itself asks for anything here."""
        if packed is None:
            raise _KeepAll
        tensor: torch.Tensor = packed
        return tensor

    def check_complete(self) -> None:
        """Raise unless the replay saved what the forward saved."""
        if self.done:
            return
        if self._count <= self._last or (self._count != len(self._metas) and not self._frame.running):
            raise Mismatch(self._count, None)
        self.done = True

    def _differs(self, index: int, tensor: torch.Tensor) -> None:
        threaded = any(call.random_end is not None for call in self._frame.calls)
        if self._frame.region.options.check_values or threaded:
            self.mismatch = Mismatch(index, meta_of(tensor), values=True)
            raise StopReplay
        profile = self._frame.call_of(index).profile
        tell_once(
            profile,
            f"the replay of region {self._frame.region.name!r} does not repeat its forward bit for bit: the first tensor that differs is "
            f"number {index} of those saved, {where_saved(self._frame, index)}. A kernel that is not deterministic, or state that a replay "
            "cannot restore; check_values=True makes this an error",
        )


def where_saved(frame: Frame, index: int) -> str:
    """The op that saved a tensor and the user's line, as far as known."""
    call = frame.call_of(index)
    script, place = call.script, index - call.first
    if script is None or place >= len(script.ops):
        return "by an op that was not watched"
    return f"by {script.ops[place]} called at {script.sources[place] or 'an unknown line'}"


def tell_once(profile: Any, message: str) -> None:
    """Warn, but only once for each piece of code."""
    kind = message[:60]
    if kind not in profile.told:
        profile.told.add(kind)
        warnings.warn(message, stacklevel=2)


def meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and strides, as far as the layout has them."""
    try:
        return tensor.shape, tensor.dtype, tensor.stride()
    except RuntimeError:
        return tensor.layout, tensor.dtype, None


def _agrees(tensor: torch.Tensor, meta: Any) -> bool:
    return tensor.dtype == meta[1] and (meta[2] is None or tensor.shape == meta[0])
