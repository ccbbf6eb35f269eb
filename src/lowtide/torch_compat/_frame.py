"""One call of a region under PyTorch's rules, which are stricter than those of lowtide's own regions.

PyTorch promises that a region's backward sees what a replay made, and tests count the replays. So here every tensor that
autograd saves is a slot, inputs and outputs included; a replay belongs to one backward (or to one ``GraphExecGroup``); and a slot
gives its tensor away once. What is better than PyTorch's own: the early stop is no ``Exception`` that user code could swallow, a
replay ends at the last slot that is still alive, and what a partial backward did not ask for is released when that backward ends.

Who holds whom: autograd holds slots, slots hold the frame; the frame knows its slots weakly. Replayed tensors are detached and
lie in the slots, so they go with them, and there is no cycle for the garbage collector to find.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide import _torch_private
from lowtide.engine._call import Call
from lowtide.engine._frame import Frame
from lowtide.engine._parts import Held, Place
from lowtide.engine._region import Region
from lowtide.engine._slot import Slot
from lowtide.engine._tree import tensors_in
from lowtide.torch_compat import _messages

Describe = Callable[[torch.Tensor], object]


class StopReplay(BaseException):
    """Every slot that is still needed is filled. Not an ``Exception``: user code that catches those must not catch this."""


def describe(tensor: torch.Tensor) -> object:
    """What ``determinism_check="default"`` compares."""
    return {"shape": tensor.shape, "dtype": tensor.dtype, "device": tensor.device}


def describe_nothing(_: torch.Tensor) -> object:
    """What ``determinism_check="none"`` compares."""
    return None


@dataclass(frozen=True)
class Rules:
    """How one call is to be replayed.

    Attributes:
        early_stop: a replay ends at the last slot that is needed.
        give_once: a slot that is asked for twice in one backward is an error, as it is for PyTorch's non-reentrant form.
        describe: what must be the same of a tensor in forward and replay.
        on_mismatch: called with a mismatch before it is raised; may raise another error in its place.
    """

    early_stop: bool
    give_once: bool
    describe: Describe
    on_mismatch: Callable[[Exception], object] | None


class StrictSlot(Slot):
    """What autograd holds in place of a saved tensor. Its ``value`` is always ``None``, so the unpack hook asks for ``original``.

    Attributes:
        values: by run, the tensor of that run's replay; ``None`` once it was given away.
    """

    __slots__ = ("strict_frame", "values")

    def __init__(self, frame: StrictFrame) -> None:
        self.frame = self.strict_frame = frame
        self.value = None
        self.values: dict[Hashable, torch.Tensor | None] = {}

    def original(self) -> torch.Tensor:
        """The tensor, from a replay."""
        return self.strict_frame.give(self)


class StrictFrame(Frame):
    """The slots of one call, and the replays that fill them.

    Attributes:
        rules: how it is to be replayed.
        replay: runs the region's function again on its inputs, in the state that the forward had.
        given: the arguments, while the call is being entered.
    """

    __slots__ = ("_described", "_fetched", "_incomparable", "_replayed", "given", "replay", "rules")

    def __init__(self, region: Region, rules: Rules) -> None:
        super().__init__(region)
        self.rules = rules
        self.replay: Callable[[StrictFrame], object] = _nothing
        self.given: Any = ()
        self._described: list[object] = []
        self._fetched: dict[int, torch.Tensor] = {}
        self._incomparable = False
        self._replayed: set[Hashable] = set()

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """The pack hook of the forward."""
        return _PackHook(self)

    def key_of(self, call: Any) -> Any:
        """Calls that save as many tensors need no watching again: nothing that is learned of a way is relied on here."""
        return len(self.slots) - call.first

    def around(self) -> Any:
        """The saved-tensor hooks of the user that surround the call, those of other regions left out."""
        hooks = self._around
        while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
            hooks = hooks[0]._user_hooks  # type: ignore[attr-defined]
        return hooks

    def keep(self, tensor: torch.Tensor) -> Place:
        """Hold an input. Hooks around the call are handed what was passed, and activations: no weight that the function only refers to.

        Autograd has that in its graph anyway; and who owns the hooks may hold what the call returns, a cycle that nobody can collect.
        """
        if self._around is None or not (tensor.is_leaf and tensor.requires_grad) or any(tensor is t for t in tensors_in(self.given)):
            return super().keep(tensor)
        return self.keep_directly(tensor)

    def leave(self, call: Call) -> None:
        """The call returned. Hooks around it that hold nothing for it are let go of, for who owns them may hold what it returned."""
        if all(isinstance(known, Held) and known.direct for _, known in self.inputs.values()):
            self._around = None
        super().leave(call)

    def pack(self, tensor: torch.Tensor) -> StrictSlot:
        """A slot for a tensor that autograd saves in the forward."""
        slot = StrictSlot(self)
        self.slots.append(weakref.ref(slot))
        with torch.no_grad():
            self._described.append(self.rules.describe(tensor))
        return slot

    def fetch(self, held: Held) -> torch.Tensor:
        """An input of the call, once a replay: an outer region gives its slots away once, too."""
        if held.index not in self._fetched:
            self._fetched[held.index] = super().fetch(held)
        return self._fetched[held.index]

    def give(self, slot: StrictSlot) -> torch.Tensor:
        """The tensor of a slot.

        Raises:
            CheckpointError: the replay did something else than the forward, or the tensor was given away in this backward.
        """
        try:
            return self._take(slot)
        except _messages.CompatMismatchError as error:
            if self.rules.on_mismatch is not None:
                self.rules.on_mismatch(error)
            raise

    def _take(self, slot: StrictSlot) -> torch.Tensor:
        run, in_backward = _current_run()
        if run not in self._replayed or run not in slot.values:
            self._fill(run)
        value = slot.values.get(run)
        if value is None:
            raise _messages.unpacked_twice(in_group=_torch_private.graph_exec_group() is not None)
        if self.rules.give_once:
            slot.values[run] = None
        if not in_backward:
            self.release(run)
        return value

    def _fill(self, run: Hashable) -> None:
        self.check_replayable()
        refill = _Refill(self, run)
        try:
            with saved_tensors_hooks(refill.pack, _as_it_is), torch.enable_grad():
                self.replay(self)
        except StopReplay:
            pass
        except BaseException as error:
            self.release(run)
            if isinstance(error, RuntimeError) and _torch_private.is_write_to_leaf(error):
                raise _messages.wrote_to_input() from error
            raise
        finally:
            self._fetched = {}
        self._replayed.add(run)
        if isinstance(run, int):
            _torch_private.at_end_of_backward(_Release(self, run))
        self._compare(run, refill)

    def _compare(self, run: Hashable, refill: _Refill) -> None:
        if self._incomparable:
            return
        if not refill.stopped and refill.count < len(self.slots):
            raise _messages.fewer_tensors(len(self.slots), refill.count)
        differing = [(i, saved, found) for i, saved, found in self._descriptions(run) if saved != found]
        if differing:
            raise _messages.other_tensors(differing)

    def _descriptions(self, run: Hashable) -> list[tuple[int, object, object]]:
        alive = [(i, slot.values.get(run)) for i, slot in self._alive()]
        return [(i, self._described[i], self.rules.describe(value)) for i, value in alive if value is not None]

    def _alive(self) -> list[tuple[int, StrictSlot]]:
        found = [(i, None if ref is None else ref()) for i, ref in enumerate(self.slots)]
        return [(i, slot) for i, slot in found if isinstance(slot, StrictSlot)]

    def stop(self) -> int | None:
        """Position at which a replay may end; ``None``: at its own end."""
        return max((i for i, _ in self._alive()), default=-1) if self.rules.early_stop else None

    def may_be_unfilled(self, tensor: torch.Tensor) -> bool:
        """Whether an op may save this tensor first and fill it then, as RReLU does with its noise."""
        fresh = not tensor.requires_grad and tensor.is_floating_point() and tensor._version == 0
        return fresh and all(tensor is not known for known in self._fetched.values())

    def surplus(self) -> None:
        """A replay may save more than the forward only if the forward is still running: a backward inside the region started it."""
        if not self.running:
            raise _messages.more_tensors()
        self._incomparable = True

    def release(self, run: Hashable) -> None:
        """Forget what the replay of one run made."""
        self._replayed.discard(run)
        for _, slot in self._alive():
            slot.values.pop(run, None)


class _PackHook:
    """Marked as PyTorch marks its own, so that its selective modes find the user's hooks behind it."""

    __slots__ = ("_frame",)
    _checkpoint_internal = True

    def __init__(self, frame: StrictFrame) -> None:
        self._frame = frame

    @property
    def _user_hooks(self) -> Any:
        return self._frame.around()

    def __call__(self, tensor: torch.Tensor) -> StrictSlot:
        return self._frame.pack(tensor)


class _Refill:
    """Packs what a replay saves into the slots, by position. It knows its frame weakly: the replay's own graph holds it.

    Attributes:
        count: tensors saved so far.
        stopped: all that is needed was saved.
    """

    def __init__(self, frame: StrictFrame, run: Hashable) -> None:
        self.count = 0
        self.stopped = False
        self._frame = weakref.ref(frame)
        self._run = run
        self._stop = frame.stop()
        self._to_end = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the next saved tensor of the replay."""
        frame = self._frame()
        if frame is None:
            return tensor.detach()
        position, self.count = self.count, self.count + 1
        self._to_end = self._to_end or (self._stop is not None and frame.may_be_unfilled(tensor))
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if position < len(frame.slots):
            self._put(frame, position, tensor)
        elif self._stop is None:
            frame.surplus()
        if self._stop is not None and position >= self._stop and not self.stopped:
            self.stopped = True
            if not self._to_end:
                raise StopReplay  # once: code that catches everything goes on to its end
        return tensor

    def _put(self, frame: StrictFrame, position: int, tensor: torch.Tensor) -> None:
        ref = frame.slots[position]
        slot = None if ref is None else ref()
        if isinstance(slot, StrictSlot):
            slot.values.setdefault(self._run, tensor)


class _Release:
    """Called when a backward ends. Holds the frame weakly, since the graph that holds it may be gone by then."""

    def __init__(self, frame: StrictFrame, run: Hashable) -> None:
        self._frame = weakref.ref(frame)
        self._run = run

    def __call__(self) -> None:
        frame = self._frame()
        if frame is not None:
            frame.release(self._run)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _nothing(_: StrictFrame) -> None:
    """No replay before the call was entered."""


def _current_run() -> tuple[Hashable, bool]:
    """What a replay belongs to now, and whether a backward will ask for more of it."""
    group = _torch_private.graph_exec_group()
    if group is not None:
        return group, True
    if _torch_private.in_backward():
        return _torch_private.graph_task_id(), True
    return object(), False
