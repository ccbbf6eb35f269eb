"""Replays of calls that go the way of the call before, with no more steps than that takes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._packing import Filling, last_wanted
from lowtide.engine._replay import give_alive
from lowtide.engine._slot import gone
from lowtide.engine._tree import tensors_in

if TYPE_CHECKING:
    from lowtide.engine._frame import Frame
    from lowtide.engine._slot import Slot
    from lowtide.engine._steady import SteadyCall

STOPPED: Any = object()
"""What comes back from a call that was ended."""


def replay_members(frame: Frame, wanted: Slot) -> bool:
    """Run the members of a frame again, up to the one that saved what is wanted, if all of them went the way of the call before.

    Returns:
        False if one did not, or its replay does something else; no slot is filled then.
    """
    count = len(frame.calls)
    while frame.calls[count - 1].first > wanted.index:
        count -= 1
    members: list[SteadyCall] = frame.calls[:count]  # type: ignore[assignment]
    kind = type(members[0])
    for call in members:
        if type(call) is not kind or not call.is_known(frame):
            return False
    last, stop = _ends(frame, members, wanted)
    pack: Any = Filling(frame.slots, last, stop)
    try:
        in_order = _run_members(frame, members, pack, stop)
    except RuntimeError as error:
        if not private.is_write_to_leaf(error):
            raise
        in_order = False
    index = pack.reached
    end = len(frame.slots) if count == len(frame.calls) else frame.calls[count].first
    if in_order and (index == stop or index + 1 == end) and all(call.is_unmodified() for call in members):
        return True
    frame.drop_values()
    return False


def _ends(frame: Frame, members: list[SteadyCall], wanted: Slot) -> tuple[int, int]:
    """The last place to fill, and the one at which the replay may end."""
    for call in members:
        assert call.script is not None
        if call.script.others:
            give_others(frame, call.script.others, call.first)
    asked = members[-1]
    script, first = asked.script, asked.first
    assert script is not None
    last = last_wanted(frame.slots, wanted.index, first + script.reach[wanted.index - first])
    if not frame.region.options.early_stop:
        return last, sys.maxsize
    return last, min(sys.maxsize, first + (script.end if asked.kept is None else script.stop)[last - first])


def _run_members(frame: Frame, members: list[SteadyCall], pack: Any, stop: int) -> bool:
    """Returns whether each of them began with the tensor that it had begun with."""
    results: list[list[torch.Tensor | None]] = []
    for place, call in enumerate(members):
        if pack.reached + 1 != call.first:  # the one before did not save what it had saved
            return False
        target, args, _ = call.arguments(frame, results)
        if call.kept is not None:
            target = call.kept.returning(frame, pack, lambda: pack.reached + 1, target, stop)
        result = call.run_again(target, args, pack, frame.since)
        if call is not members[-1]:
            if result is STOPPED:
                return False
            frame.pass_on(place, tensors_in(result), results)
    return True


def give_others(frame: Frame, places: set[int], first: int = 0) -> None:
    """Give the slots at these places, counted from the first of their member, their tensors, where somebody else keeps them."""
    for place in tuple(places):
        ref = frame.slots[first + place]
        slot = None if ref is None else ref()
        if slot is not None and slot.value is None and slot.ref is not gone:
            give_alive(frame, slot)
