"""Running a call again in backward, as far as backward needs it.

The tensors that autograd saves in the replay come in the order in which it saved them in forward, so the place in that
order says which slot one belongs to. As soon as the last slot that backward may want is filled, ``StopReplay`` ends the
replay: it is no ``Exception``, so no handler of the user's own code takes it for an error.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.profiler import record_function

from lowtide import _torch_private as private
from lowtide.engine._slot import Slot
from lowtide.engine._tree import tensors_in
from lowtide.errors import ReplayMismatchError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame, Meta


class StopReplay(BaseException):
    """Ends a replay that has made all that was needed."""


class _Thread(threading.local):
    depth = 0


_thread = _Thread()
_seconds = [0.0]


def is_replaying() -> bool:
    """Whether this code runs again in backward, to make what backward needs, rather than in the forward itself."""
    return _thread.depth > 0


def replay_seconds() -> float:
    """Seconds that this process has spent in replays, those inside a replay not counted twice."""
    return _seconds[0]


def replay(frame: Frame, wanted: Slot) -> None:
    """Fill ``wanted`` and every other slot of the frame that autograd still holds.

    Raises:
        ReplayMismatchError: the region did not do what it did in forward.
        InputChangedError: an input, a parameter or a buffer was modified since.
    """
    recorder = Recorder(frame, _missing(frame))
    started = time.perf_counter()
    _thread.depth += 1
    try:
        if private.profiler_active():
            with record_function("lowtide::replay"):
                _run(frame, recorder)
        else:
            _run(frame, recorder)
    finally:
        _thread.depth -= 1
        spent = time.perf_counter() - started
        frame.region.replay_s += spent
        if _thread.depth == 0:
            _seconds[0] += spent
    recorder.check_complete()


def _missing(frame: Frame) -> dict[int, Slot]:
    """The slots that autograd still holds. One whose tensor is alive gets that tensor: it may be gone by the time it is asked for."""
    missing = {}
    for ref in frame.slots:
        slot = None if ref is None else ref()
        if slot is not None and slot.value is None:
            original = slot.original()
            if original is None:
                missing[slot.index] = slot
            else:
                slot.value = original.detach()
    return missing


def _run(frame: Frame, recorder: Recorder) -> None:
    results: list[list[torch.Tensor]] = []
    for call in frame.calls:
        args, kwargs = call.arguments(frame, results)
        with call.surroundings(frame.region.name):
            private.push_hooks(recorder.pack, recorder.unpack)
            try:
                result = call.run(args, kwargs)
            except StopReplay as stop:
                if stop is not recorder.stop:
                    raise
                stop.__traceback__ = None  # its frames lead back to the recorder: the cycle would keep every slot filled
            finally:
                private.pop_hooks()
        if recorder.done:
            return
        if call is not frame.calls[-1]:
            results.append(list(tensors_in(result)))


class Recorder:
    """Hooks of a replay: puts what autograd saves into the slots.

    Attributes:
        stop: ends the replay.
        done: every slot is filled.
    """

    def __init__(self, frame: Frame, missing: dict[int, Slot]) -> None:
        self.frame = frame
        self.stop = StopReplay()
        self.done = False
        self._missing = missing
        self._last = max(missing)
        self._count = 0

    def pack(self, tensor: torch.Tensor) -> None:
        """Take the next saved tensor of the replay."""
        if self.done:
            return
        index = self._count
        self._count = index + 1
        metas = self.frame.metas
        if index >= len(metas) or not _agrees(tensor, metas[index]):
            raise self._mismatch(index, tensor)
        slot = self._missing.get(index)
        if slot is not None:
            slot.value = tensor.detach()
        if index == self._last:
            self.done = True
            if self.frame.region.options.early_stop:
                raise self.stop

    def unpack(self, packed: Any) -> torch.Tensor:
        """The graph that a replay makes is thrown away; nobody goes backward through it."""
        raise ReplayMismatchError(f"region {self.frame.region.name!r}: its forward takes gradients of its own, which a replay cannot give yet")

    def check_complete(self) -> None:
        """Raise unless every slot was filled."""
        if not self.done:
            raise ReplayMismatchError(
                f"the replay of region {self.frame.region.name!r} saved {self._count} tensors where the forward had saved {len(self.frame.metas)}"
            )

    def _mismatch(self, index: int, tensor: torch.Tensor) -> ReplayMismatchError:
        metas = self.frame.metas
        had = f"{metas[index][:2]}" if index < len(metas) else "none"
        return ReplayMismatchError(
            f"the replay of region {self.frame.region.name!r} saved other tensors than the forward: at place {index} "
            f"the forward had {had}, the replay has {(tensor.shape, tensor.dtype)}"
        )


def _agrees(tensor: torch.Tensor, meta: Meta) -> bool:
    if tensor.dtype != meta[1] or tensor.device != meta[2]:
        return False
    return meta[3] is None or tensor.shape == meta[0]
