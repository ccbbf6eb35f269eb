"""The unpack hook of every region: what backward gets, and how long what a replay made is kept.

A tensor made by a replay lives until autograd lets go of it. In a backward that retains its graph autograd never does, so
tensors that backward has had are dropped when the next region is replayed, and those it never asked for when the backward
is over. Only the region replayed last keeps its tensors: a second loss over it, or a backward for the weights after one
for the inputs, need not replay it again. A pipeline's schedule that goes backward for the inputs of a stage and, some micro-batches later,
for its weights says so by the function that it calls: there all regions keep theirs until autograd lets go.
"""

from __future__ import annotations

import threading
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._acceleration import native
from lowtide.engine._claims import CLAIMED, release, wait_for
from lowtide.engine._packing import drop_values
from lowtide.engine._replay import replay, tell_once
from lowtide.engine._slot import Slot, check_unchanged, gone
from lowtide.engine._thread import StopReplay

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._profile import Profile


class _Recent:
    """What a thread replayed: the last frame, and all frames of the backward that runs."""

    __slots__ = ("frames", "last", "split", "task", "whole")

    def __init__(self) -> None:
        self.last: weakref.ref[Frame] | None = None
        self.task = -1
        self.frames: list[weakref.ref[Frame]] = []
        self.whole: tuple[Profile, str] | None = None
        self.split = False


class _Thread(threading.local):
    """Of each thread its own, in one object: looking up anything of a thread takes as long as all the rest of ``_note``."""

    def __init__(self) -> None:
        self.recent = _Recent()


THREAD = _Thread()
_MANY = 16
"""Tensors that a region drops, from which on it is worth a warning that this saves nothing."""
_LOSS_NODES = 16
"""Backward nodes between the end of a region and the backward that may be the loss."""


def unpack(packed: Any) -> torch.Tensor:
    """Give back what the pack hook of a frame was given."""
    if type(packed) is tuple:
        tensor: torch.Tensor = packed[0]
        if tensor._version != packed[1]:
            check_unchanged(*packed)
        return tensor
    slot: Slot = packed
    value = slot.value
    if value is None:
        original = slot.original()
        if original is not None:
            return original
        value = _replay_for(slot)
    if value._version != slot.version:
        check_unchanged(value, slot.version, slot.frame.region)
    slot.given = True
    return value


if native is not None:
    native.configure(Slot, gone, StopReplay, unpack)
    unpack = native.unpack


def _replay_for(slot: Slot) -> torch.Tensor:
    task = private.graph_task_id()
    frame = slot.frame
    if frame.nested:
        for wanted in reversed(_chain(slot)):
            _replay_claimed(wanted.frame, wanted, task)
    else:
        _replay_claimed(frame, slot, task)
    value = slot.value
    assert value is not None
    if task == -1:
        frame.drop_values()
    return value


def _replay_claimed(frame: Frame, wanted: Slot, task: int) -> None:
    """Replay a frame, which no other thread may do meanwhile; it may be under way in this one."""
    _note(frame, task)
    number, thread = id(frame), get_ident()
    within = CLAIMED.get(number) == thread
    try:
        if CLAIMED.setdefault(number, thread) != thread:
            wait_for(number, thread)
        if wanted.value is None:
            replay(frame, wanted)
    finally:
        if not within:
            release(number, thread)


def _chain(slot: Slot) -> list[Slot]:
    """The slot, then one of the region around that its replay needs first, and so on outwards.

    Replays then run one after the other from the outermost inwards, instead of one inside the other.
    """
    chain, frame = [slot], slot.frame
    while frame.nested:
        last = None
        for held in frame.held:
            if type(held) is not Slot or held.value is not None or (last is not None and held.index <= last.index):
                continue
            if held.original() is None:
                last = held
        if last is None:
            break
        chain.append(last)
        frame = last.frame
    return chain


def _note(frame: Frame, task: int) -> None:
    recent = THREAD.recent
    if task != -1:
        if recent.task != task:
            _begin(recent, frame, task)
        if recent.split:
            return
    this, before = weakref.ref(frame), recent.last
    if before is not None and before is not this:
        last = before()
        if last is not None:
            drop_values(last.slots, True)
    if task != -1:
        recent.frames.append(this)
    recent.last = this


def _begin(recent: _Recent, frame: Frame, task: int) -> None:
    """A backward replays its first region."""
    _release(recent.frames, None)
    recent.task, recent.frames = task, []
    recent.whole, recent.split = _covers_all(frame), private.in_input_backward()
    private.at_end_of_backward(_finish)


def _covers_all(frame: Frame) -> tuple[Profile, str] | None:
    """What to say if it turns out that this is the only region of the step, from the first layer to the loss."""
    call = frame.calls[0]
    if len(frame.calls) > 1 or frame.running or call.script is None or not call.script.first:
        return None
    dropped, nodes = sum(map(bool, call.script.plain)), private.next_sequence_number() - call.ended_at
    if dropped < _MANY or not 0 <= nodes <= _LOSS_NODES:
        return None
    return call.profile, (
        f"region {frame.region.name!r} is the only one of its step and holds all of it: its replay makes all {dropped} tensors again before"
        " any is let go of, so the peak is as high as without. Make each of its layers a region of its own, or let lowtide.fit choose"
    )


def _finish() -> None:
    recent = THREAD.recent
    if recent.whole is not None and len(recent.frames) == 1:
        tell_once(*recent.whole)
    frames, last = recent.frames, recent.last
    recent.task, recent.frames = -1, []
    _release(frames, None if last is None else last())


def _release(frames: list[weakref.ref[Frame]], but: Frame | None) -> None:
    for ref in frames:
        frame = ref()
        if frame is not None and frame is not but:
            frame.drop_values()
