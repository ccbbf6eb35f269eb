"""Running a call again in backward, as far as backward needs it.

The tensors that autograd saves in the replay come in the order in which it saved them in forward, so the place in that
order says which slot one belongs to. As soon as the last slot that backward may want is filled, ``StopReplay`` ends the
replay: it is no ``Exception``, so no handler of the user's own code takes it for an error.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd.profiler import record_function

from lowtide import _torch_private as private
from lowtide.engine._observers import OBSERVERS, tell_replayed
from lowtide.engine._slot import Slot, gone
from lowtide.engine._thread import Mismatch, StopReplay, state
from lowtide.engine._trained import trained_as_in_forward
from lowtide.engine._transforms import transforms_allowed_in
from lowtide.engine._tree import tensors_in
from lowtide.engine._values import hash_of, meta_of, same_hash
from lowtide.errors import InputChangedError

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame

SECONDS = [0.0]


def replay_seconds() -> float:
    """Seconds that this process has spent in replays, those inside a replay not counted twice."""
    return SECONDS[0]


def replay(frame: Frame, wanted: Slot) -> None:
    """Fill ``wanted`` and what else of the frame autograd may ask for next.

    Raises:
        ReplayMismatchError: the region did not do what it did in forward.
        InputChangedError: an input, a parameter or a buffer was modified since.
    """
    if frame.broken:
        frame.check_replayable()
    region, mine = frame.region, vars(state)
    if region.listener is not None:
        region.listener.replayed()
    started = time.perf_counter()
    depth, level = mine["depth"], mine["level"]
    mine["depth"], mine["level"] = depth + 1, private.dual_level()
    try:
        if not frame.calls[0].replay(frame, wanted):
            replay_all(frame, wanted)
    except BaseException as error:
        fail(frame, error)
    finally:
        mine["depth"], mine["level"] = depth, level
        spent = time.perf_counter() - started
        region.replay_s += spent
        if OBSERVERS:
            tell_replayed(frame, spent)
        if depth == 0:
            SECONDS[0] += spent
            mine["joined"].clear()


def fail(frame: Frame, error: BaseException) -> NoReturn:
    """Raise what a replay raises that ended in an error."""
    frame.drop_values()  # what it has made may be wrong already, and a later backward would take it for right
    for call in frame.calls if isinstance(error, InputChangedError) else ():
        call.learn_written()
    if not isinstance(error, Mismatch):
        raise error
    from lowtide.engine._diagnosis import explain_mismatch

    raise explain_mismatch(frame, error) from None


def replay_all(frame: Frame, wanted: Slot) -> None:
    """Fill a slot, and what else autograd may ask for, in the way of any call."""
    missing = _missing(frame, wanted)
    try:
        with record_function("lowtide::replay") if private.profiler_active() else nullcontext(), trained_as_in_forward(frame.calls):
            _fill(frame, missing)
    finally:
        missing.clear()  # autograd holds the pack hook as long as a tensor made here lives, and the hook this list: a cycle


def _missing(frame: Frame, wanted: Slot) -> list[Slot | None]:
    """The slots to fill, by place: those that autograd still holds, up to where what follows cannot belong to the op that asked.

    One whose tensor is alive gets that tensor: it may be gone by the time it is asked for.
    """
    call = frame.call_of(wanted.index)
    end = len(frame.slots) if call.script is None else call.first + call.script.reach[wanted.index - call.first]
    missing: list[Slot | None] = [None] * end
    for index, ref in enumerate(frame.slots[:end]):
        if ref is not None:
            slot = ref()
            if slot is not None and slot.value is None and (slot.ref is gone or not give_alive(frame, slot)):
                missing[index] = slot
    while missing[-1] is None:  # the one that is wanted is missing, or the frame would not be replayed
        missing.pop()
    return missing


def give_alive(frame: Frame, slot: Slot) -> bool:
    """If somebody else kept the tensor, give it to its slot; returns whether that is so."""
    original = slot.original()
    if original is None:
        _note_gone(frame, slot)
        return False
    slot.put(original)
    return True


def _note_gone(frame: Frame, slot: Slot) -> None:
    """Nobody else kept the tensor: later calls need not look."""
    slot.ref = gone
    call = frame.call_of(slot.index)
    if call.script is not None:
        call.script.plain[slot.index - call.first] = 2
        call.script.others.discard(slot.index - call.first)


def _fill(frame: Frame, missing: list[Slot | None]) -> None:
    """Run once; once more where it turns out that something has to be set right first."""
    try:
        _run_once(frame, missing)
    except KeepAll:
        frame.calls[0].profile.differentiates = True
        frame.drop_values()
        _run_once(frame, missing)
    except InputChangedError as error:
        ended = [call for call in frame.calls if call.random_end is not None]
        if not ended or isinstance(error.__context__, Mismatch):
            raise
        for call in ended:  # run to the end, to see that it drew as much, as it did: what was modified may be needed only there
            call.random_end = None
        frame.drop_values()
        _run_once(frame, missing)


def _run_once(frame: Frame, missing: list[Slot | None]) -> None:
    recorder = Recorder(frame, missing)
    if recorder.keeps:
        with _gradients_kept(frame):
            run_calls(frame, recorder)
    else:
        run_calls(frame, recorder)
    if not recorder.done:
        recorder.check_complete()
    if recorder.differing is not None:
        recorder.check_values()
    for call in frame.calls:
        if call.script is not None and call.script.late:
            _accept_late(call.first, call.script.late, missing)


@contextmanager
def _gradients_kept(frame: Frame) -> Iterator[None]:
    """A region that calls backward adds to gradients; its replay must not do so again."""
    watched = [tensor for call in frame.calls for _, taken in call.watches for tensor in taken[0]]
    leaves = [t for t in (*watched, *frame.held) if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf]
    before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad.clone()) for leaf in leaves]
    try:
        yield
    finally:
        for leaf, grad, copy in before:
            if grad is not None and copy is not None:
                grad.detach().copy_(copy)
            leaf.grad = grad


def _accept_late(first: int, late: set[int], missing: list[Slot | None]) -> None:
    """What was filled after it was saved has another version by now, as it had in forward."""
    for place in late:
        slot = missing[first + place] if first + place < len(missing) else None
        if slot is not None and slot.value is not None:
            slot.version = slot.value._version


def run_calls(frame: Frame, recorder: Recorder) -> None:
    """Call the members one after the other until the recorder has enough."""
    results: list[list[torch.Tensor | None]] = []
    pack = recorder.pack_hook()
    around = state.keeps, state.finder, state.since
    state.keeps, state.finder, state.since = frame.running or recorder.keeps, None, frame.since
    try:
        with transforms_allowed_in(*frame.calls):
            _call_members(frame, recorder, pack, results)
    finally:
        state.keeps, state.finder, state.since = around
    if recorder.mismatch is not None:
        raise recorder.mismatch


def _call_members(frame: Frame, recorder: Recorder, pack: Callable[[torch.Tensor], Any], results: list[list[torch.Tensor | None]]) -> None:
    last = len(frame.calls) - 1
    for index, call in enumerate(frame.calls):
        target, args, kwargs = call.arguments(frame, results)
        if call.kept is not None and not (recorder.runs_all or state.keeps or frame.hashes):
            target = call.kept.returning(frame, pack, recorder.count, target)
        private.push_hooks(pack, unpack_in_replay)
        try:
            result = call.run(frame.region.name, target, args, kwargs)
        except StopReplay:
            if not recorder.done and recorder.mismatch is None:
                raise
        except RuntimeError as error:
            if not private.is_write_to_leaf(error):
                raise
            raise Mismatch(recorder.count(), None, wrote=True) from error
        finally:
            private.pop_hooks()
        if recorder.done or recorder.mismatch is not None:
            break
        if index != last:
            if recorder.count() != frame.calls[index + 1].first:  # the next one may save as many fewer: it would all be of the right kind
                raise Mismatch(min(recorder.count(), frame.calls[index + 1].first), None)
            frame.pass_on(index, tensors_in(result), results)


class KeepAll(BaseException):
    """The region goes backward through its own replay: what it saves must be kept while it runs."""


class Recorder:
    """Hooks of a replay: puts what autograd saves into the slots.

    Attributes:
        done: every slot is filled.
        mismatch: the first place at which the replay differs from the forward.
        keeps: what the replay saves is kept while it runs: it is a region that goes backward through parts of itself.
        differing: the first saved tensor whose values are not those of the forward, and what it is.
        runs_all: calls whose results are kept are run all the same.
        count: tells how many tensors were saved so far.
    """

    runs_all = False
    __slots__ = ("_frame", "_last", "_missing", "_stop", "count", "differing", "done", "keeps", "mismatch")

    def __init__(self, frame: Frame, missing: list[Slot | None]) -> None:
        self.done = False
        self.mismatch: Mismatch | None = None
        self._frame = frame
        self._last = len(missing) - 1
        self._missing = missing
        self._stop = self._stop_at(frame)
        self.differing: tuple[int, tuple[Any, ...]] | None = None
        self.keeps = frame.calls[0].profile.differentiates or (len(frame.calls) > 1 and _any_differentiates(frame))
        self.count: Callable[[], int] = int

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """The pack hook. It refers to the recorder, which therefore must not refer to it."""
        frame = self._frame
        plain = _pack_hook(self, self._missing, min(self._stop, len(frame.slots)), frame.running or self.keeps)
        return plain if frame.hashes is None else self._checking(plain, frame.hashes)

    def _stop_at(self, frame: Frame) -> int:
        """Where the replay may end: not in code that cleans up after itself, nor before a tensor has its values."""
        if frame.running:
            return self._last
        call = frame.call_of(self._last)
        if call.script is None or not frame.region.options.early_stop or call.random_end is not None:
            return sys.maxsize
        return call.first + call.script.stop[self._last - call.first]

    def fail(self, index: int, tensor: torch.Tensor) -> None:
        """End the replay: it does something else."""
        self.mismatch = Mismatch(index, meta_of(tensor))
        raise StopReplay

    def end(self, index: int, tensor: torch.Tensor) -> None:
        """All there is to make was made, or the replay saves more than the forward did. User code may have caught the end before."""
        if self.done or self.mismatch is not None:
            return
        if index < self._stop:
            self.fail(index, tensor)
        self.done = True
        raise StopReplay

    def check_complete(self) -> None:
        """Raise unless the replay saved what the forward saved."""
        count = self.count()
        if count <= self._last or (count != len(self._frame.slots) and not self._frame.running):
            raise Mismatch(count, None)
        self.done = True

    def _checking(self, pack: Callable[[torch.Tensor], Any], hashes: dict[int, Any]) -> Callable[[torch.Tensor], Any]:
        """The pack hook, with values compared first."""

        def check_and_pack(tensor: torch.Tensor) -> Any:
            index = self.count()
            if self.differing is None and not self.done and index in hashes and not same_hash(hash_of(tensor), hashes[index]):
                self.differing = index, meta_of(tensor)
            return pack(tensor)

        return check_and_pack

    def check_values(self) -> None:
        """Raise, or in a call that was only audited warn, if what was made is not what the forward had."""
        if self.differing is None:
            return
        index, found = self.differing
        for observer in OBSERVERS:
            observer.differs(self._frame, index)
        if self._frame.slots[index] is None and self._frame.call_of(index).kept is None:
            raise InputChangedError(
                f"region {self._frame.region.name!r} needs a tensor of shape {tuple(found[0])} as it was in forward, number {index} "
                f"of those saved, {where_saved(self._frame, index)}: it has other values by now, written past autograd, through .data "
                "or memory that it shares; do that after backward, or on a copy"
            )
        profile = self._frame.call_of(index).profile
        if self._frame.region.options.check_values or any(call.random_end is not None for call in self._frame.calls):
            raise Mismatch(index, found, values=True)
        from lowtide.engine._repeating import repeats_itself

        if not OBSERVERS and repeats_itself(self._frame, index):
            profile.unsteady, profile.steady = True, None
            raise Mismatch(index, found, values=True)
        tell_once(
            profile,
            f"the replay of region {self._frame.region.name!r} does not repeat its forward bit for bit: the first tensor that differs is "
            f"number {index} of those saved, {where_saved(self._frame, index)}. A kernel that is not deterministic, or state that a replay "
            "cannot restore; check_values=True makes this an error",
        )


def _any_differentiates(frame: Frame) -> bool:
    return any(call.profile.differentiates for call in frame.calls)


def _pack_hook(recorder: Recorder, missing: list[Slot | None], bound: int, keep: bool) -> Callable[[torch.Tensor], Any]:
    """Takes the next saved tensor of a replay. A closure, for it runs for every saved tensor."""
    index, count = -1, len(missing)

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal index
        index += 1
        if index < count:
            slot = missing[index]
            if slot is not None:
                if tensor.dtype is not slot.dtype or (tensor.shape != slot.shape and slot.shape is not None):
                    recorder.fail(index, tensor)
                # Not detached: the graph of the replay, which comes with it, holds no tensors, unless what is saved is kept.
                slot.value = tensor.detach() if keep else tensor
                slot.version = tensor._version
                if state.saved is not None:
                    state.saved.add(private.storage_key(tensor))
            if index < bound:
                return tensor.detach() if keep else None
        if index >= bound:
            recorder.end(index, tensor)
        return tensor.detach() if keep else None

    recorder.count = lambda: index + 1
    return pack


def unpack_in_replay(packed: Any) -> torch.Tensor:
    """Only a region that goes backward through parts of itself asks for anything here."""
    if packed is None:
        raise KeepAll
    tensor: torch.Tensor = packed
    return tensor


def where_saved(frame: Frame, index: int) -> str:
    """The op that saved a tensor and the user's line, as far as known."""
    op, source = saved_by(frame, index)
    return f"by {op} called at {source or 'an unknown line'}" if op else "by an op that was not watched"


def saved_by(frame: Frame, index: int) -> tuple[str, str]:
    """The op that saved a tensor in forward and the user's line, as the last audit saw them; empty where nothing is known."""
    if index < 0 or index >= len(frame.slots):
        return "", ""
    call = frame.call_of(index)
    script, place = call.script, index - call.first
    return ("", "") if script is None or place >= len(script.ops) else (script.ops[place], script.sources[place])


def tell_once(profile: Any, message: str) -> None:
    """Warn, but only once for each piece of code."""
    kind = message[:60]
    if kind not in profile.told:
        profile.told.add(kind)
        warnings.warn(message, stacklevel=2)
