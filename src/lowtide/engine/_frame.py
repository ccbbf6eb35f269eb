"""One call of a region, or of a segment of sibling modules: what was passed in, what autograd saved, how to get it back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Set
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from lowtide import _torch_private as private
from lowtide.engine._call import Call
from lowtide.engine._guards._modules import version_of
from lowtide.engine._packing import drop_values, packing
from lowtide.engine._parts import Held, Made, Place
from lowtide.engine._slot import Slot
from lowtide.engine._sources import site_of
from lowtide.engine._thread import is_replaying
from lowtide.engine._trained import trained_in
from lowtide.engine._tree import tensors_in
from lowtide.errors import InputChangedError, ReplayError

if TYPE_CHECKING:
    from lowtide.engine._profile import Script
    from lowtide.engine._region import Region


class Frame:
    """What is kept of a call until backward is through with it.

    Attributes:
        region: what was called.
        calls: the member calls so far; one, unless the region is a segment.
        held: the tensor inputs, cut off from the graph that made them; packed by the hooks around the region where there are any.
        inputs: every tensor that the member being run was given, in order, with what stands for it.
        slots: for each tensor that autograd saved, in order, its slot, weakly; ``None`` for what was kept as it is.
        hashes: of the saved tensors, by place, where their values are to be checked.
        broken: why it cannot be replayed, if so.
        sites: where the tensors were saved that the last member saved, as numbers; not kept for the forward of a module.
        running: its forward is not over yet.
        packs_kept: results of kept calls are handed to the hooks around the region.
        since: the time at which the outermost region around it was entered, see ``_kept``.
        taken: by member and place among its results, what was given to later members, and the last of those.
        joinable: it may get several members.
    """

    hashes: dict[int, Any] | None = None
    broken = ""
    running = True
    packs_kept = False
    joinable = False
    since = 0
    sites: list[int]
    taken: dict[tuple[int, int], int] = {}  # noqa: RUF012 – replaced, never changed, by frames of several members
    _copied: Set[int] = frozenset()
    _strange = False
    _made: dict[int, tuple[weakref.ref[torch.Tensor], Made]] | None = None

    def __init__(self, region: Region) -> None:
        self.region = region
        self.calls: list[Call] = []
        self.held: list[Any] = []
        self.inputs: dict[int, tuple[torch.Tensor, Held | Made]] = {}
        self.slots: list[weakref.ref[Slot] | None] = []
        self._around = private.top_hooks()

    def enter(self, copied: Set[int]) -> None:
        """A member is about to be called; ``copied`` are those of its tensors that it writes to."""
        self._copied = copied
        self._strange = False
        self.sites = []

    def enter_again(self) -> None:
        """A member is about to be called that writes to nothing it is given; in a frame that is new there is nothing to do."""
        if self.calls:
            self.enter(frozenset())
            self.running = True

    def keep_directly(self, tensor: torch.Tensor) -> Place:
        """Hold what only audits look for. A region around it does not hear of it, for its replays are not audited."""
        around, self._around = self._around, None
        try:
            known = self.inputs.get(id(tensor))
            held = self.keep(tensor) if known is None else known[1]
            if known is None and isinstance(held, Held):
                held.direct = True
            return held
        finally:
            self._around = around

    def keep(self, tensor: torch.Tensor) -> Place:
        """Hold an input of the call that is being entered, unless an earlier member made it."""
        known = self.inputs.get(id(tensor))
        if known is not None:
            return known[1]
        version = version_of(tensor)
        if self._made is not None:
            made = self._made.get(id(tensor))
            if made is not None and made[0]() is tensor and made[1].version == version:
                self.inputs[id(tensor)] = tensor, made[1]
                self.taken[made[1].call, made[1].leaf] = len(self.calls)
                return made[1]
        index, place = len(self.held), len(self.inputs)
        copied = place in self._copied
        held = Held(index, place, tensor.requires_grad, version, copied)
        self.inputs[id(tensor)] = (tensor, held)
        if version == -1 and not copied:  # of inference mode: hooks are never given one, for autograd does not save it
            held.direct = True
            self.held.append(tensor)
        elif self._around is not None:
            self.held.append(self._pack_around(tensor.detach().clone() if copied else tensor))
        elif copied:
            self.held.append(tensor.detach().clone())
        elif tensor.is_leaf:
            self.held.append(tensor)
        else:
            self.held.append(tensor.detach().requires_grad_() if held.requires_grad else tensor.detach())
        return held

    def _pack_around(self, tensor: torch.Tensor) -> Any:
        """Give an input to the hooks around the region: an outer region drops it, an offloading hook moves it."""
        assert self._around is not None
        grad = torch.is_grad_enabled()  # it is where regions begin, but need not be where a result is kept
        private.set_grad_enabled(False)
        try:
            return self._around[0](tensor)
        finally:
            private.set_grad_enabled(grad)

    def hold(self, tensor: torch.Tensor, *, copied: bool = False) -> int:
        """Hold a result of a kept call; returns its place in ``held``."""
        kept = tensor.detach().clone() if copied else tensor
        self.held.append(self._pack_around(kept) if self.packs_kept else kept.detach())
        return len(self.held) - 1

    def unpack_held(self, packed: Any) -> torch.Tensor:
        """Have what the hooks around the region were handed."""
        assert self._around is not None
        grad = torch.is_grad_enabled()
        private.set_grad_enabled(False)
        try:
            return self._around[1](packed)
        finally:
            private.set_grad_enabled(grad)

    def copy_input(self, tensor: torch.Tensor, held: Held) -> None:
        """The call is about to write to an input for the first time: hold it as it still is."""
        self.held[held.index] = tensor.detach().clone()
        held.copied = held.direct = True
        held.version = -2

    def fetch(self, held: Held) -> torch.Tensor:
        """An input of the call as it was.

        Raises:
            InputChangedError: it was modified since.
        """
        kept: torch.Tensor = self.held[held.index]
        if self._around is not None and not held.direct:
            kept = self.unpack_held(kept)
        elif not held.copied and held.version != -1 and kept._version != held.version:
            raise self._input_changed(held, kept)
        if held.copied:
            return _working_copy(kept, held.requires_grad)
        return kept if kept.requires_grad == held.requires_grad else kept.detach().requires_grad_(held.requires_grad)

    def _input_changed(self, held: Held, tensor: torch.Tensor) -> InputChangedError:
        names = [name for call in self.calls for name in call.names_of(held)]
        return InputChangedError(
            f"region {self.region.name!r} needs its input {names[0] if names else '?'} (shape {tuple(tensor.shape)}) as it was in forward: "
            "one of the variables needed for gradient computation has been modified by an inplace operation "
            f"(version {held.version} then, {tensor._version} now); do the modification after backward, or on a copy"
        )

    @property
    def around_pack(self) -> Callable[[torch.Tensor], Any] | None:
        """The pack hook around the region."""
        return None if self._around is None else self._around[0]

    @property
    def nested(self) -> bool:
        """Whether the inputs are held by hooks around the region."""
        return self._around is not None

    def pack_hook(self) -> Callable[[torch.Tensor], Any]:
        """The pack hook of the call that was entered last.

        Which places hold an activation, and which of those are gone by the time backward asks, is taken from the script
        of the call before: a guess that costs a replay when it is wrong, never a gradient.
        """
        call, region = self.calls[-1], self.region
        script = call.profile.expected
        plain, grads = (_NONE, _NONE) if script is None else (script.plain, script.grads)
        if region.options.first_saved is None or self._around is not None:
            return packing(self.slots, plain, grads, call.first, self, region, self._keep_free)
        dropped = max(region.options.first_saved - call.first, 0)  # of what follows each tensor is asked about
        return packing(self.slots, plain[:dropped], grads[:dropped], call.first, self, region, self._keep_last)

    def _keep_last(self, tensor: torch.Tensor, region: Region) -> Any:
        """As ``_keep_free``, where a region drops the first of the tensors that are saved, and keeps the others."""
        free, count = self._keep_free(tensor, region), region.options.first_saved
        return (tensor.detach(), tensor._version, region) if free is None and count is not None and len(self.slots) >= count else free

    def _keep_free(self, tensor: torch.Tensor, region: Region) -> Any:
        """What to hold of a tensor that was there before the call: an input, a view of one, or statistics of its modules.

        Of what hooks around the region were handed, only what a region around holds in this way too: the rest is gone until they are asked.
        """
        version, base = tensor._version, tensor._base
        known = self._held_as(tensor)
        if known is not None:
            held = self.held[known.index]
            return (held, version, region) if self._around is None else held if self._is_free(held, version) else None
        if base is not None and base._version == version:
            known = self._held_as(base)
            if known is not None and (self._around is None or self._is_free(self.held[known.index], version)):
                return tensor.detach(), version, region
        for watch, _ in self.calls[-1].watches:
            if watch.statistics.has(tensor):
                return tensor, version, region
        return None

    def _is_free(self, packed: Any, version: int) -> bool:
        """Whether this is how a region around holds an input of its own in this version: it is there all the time."""
        return type(packed) is tuple and len(packed) == 3 and packed[1] == version and type(packed[2]) is type(self.region)

    def _held_as(self, tensor: torch.Tensor) -> Held | None:
        """What stands for an input that is held itself: no copy of it, nor what an earlier member makes again."""
        known = self.inputs.get(id(tensor))
        return known[1] if known is not None and isinstance(known[1], Held) and not known[1].copied else None

    def remember_results(self, result: Any) -> None:
        """Note what a member returned: it need not be held when a later member is given it."""
        call = len(self.calls) - 1
        if self._made is None:
            self._made = {}
        if not self.taken:
            self.taken = {}
        for leaf, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            self._made[id(tensor)] = weakref.ref(tensor), Made(call, leaf, version_of(tensor))

    def joins(self, values: Iterable[Any]) -> bool:
        """Whether one of these is a tensor that an earlier member returned."""
        for value in values:
            made = None if self._made is None else self._made.get(id(value))
            if made is not None and made[0]() is value:
                return True
        return False

    def follow(self) -> bool:
        """Have the next member hand its inputs to the hooks around it: those of a region around are others in each of its members.

        Returns:
            False if they belong to something else than those of the members before. Then it must not join: what this call holds is got
            back in one way, and a replay around that runs one of the members alone would find it joined to nothing.
        """
        before, around = self._around, private.top_hooks()
        if around is None or before is None:
            return around is before
        if around != before:
            within = getattr(around[0], "frame", None)
            if within is None or getattr(before[0], "frame", None) is not within:
                return False
            self._around = around
        return True

    def mark(self, hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """Have a pack hook tell whose it is, see ``follow``; of a call that stands alone there is only one."""
        if self.joinable and isinstance(hook, FunctionType):  # what is compiled tells anyway
            vars(hook)["frame"] = self
        return hook

    def pass_on(self, member: int, made: list[torch.Tensor], results: list[list[torch.Tensor | None]]) -> None:
        """In a replay, hold what later members are given of what one made; what no later one is given goes, as it went in forward."""
        results.append([tensor if (member, leaf) in self.taken else None for leaf, tensor in enumerate(made)])
        for (maker, leaf), until in self.taken.items():
            if until == member:
                results[maker][leaf] = None

    def leave_as(self, script: Script, call: Call) -> bool:
        """A call returned: leave it if it went this way, as far as it shows, and wrote to none of its inputs."""
        if len(self.slots) - call.first != len(script.plain) or self._strange:
            return False
        for tensor, known in self.inputs.values():
            if version_of(tensor) != known.version:
                return False
        self.inputs = {}
        self.running = False
        call.ended_at = private.next_sequence_number()
        call.script = script
        return True

    def leave(self, call: Call) -> None:
        """The call returned: learn from what changed although no audit had seen that it would."""
        self.running = False
        for place, (tensor, known) in enumerate(self.inputs.values()):
            if known.version >= 0 and tensor._version != known.version and not (isinstance(known, Held) and known.copied):
                call.profile.copied.add(place)
                if isinstance(known, Held):
                    self._give_up_input(tensor, known)
        self.inputs = {}
        if not call.python_state and call.outside:
            call.forget_own_changes()
        if is_replaying():
            return
        call.ended_at = private.next_sequence_number()
        call.script = call.profile.scripts.get(self.key_of(call))
        if self._strange and call.script is call.profile.expected:
            call.script = None
        call.profile.expected = call.script
        if call.script is None:
            call.profile.met_stranger()
        elif self.hashes is not None:
            for place in call.script.unread:
                self.hashes.pop(call.first + place, None)

    def key_of(self, call: Call) -> Any:
        """What a call shows of the way it went. A function may do anything each time, so it is the lines that saved something."""
        call.trained = trained_in(call.watches)
        return call.trained, len(self.slots) - call.first if call.fixed else tuple(self.sites)

    def note_sites(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """The pack hook of a function, noting from where in the code it is called."""
        add, caller = self.sites.append, sys._getframe

        def note_and_pack(tensor: torch.Tensor) -> Any:
            add(site_of(caller(1)))
            return pack(tensor)

        return note_and_pack

    def _give_up_input(self, tensor: torch.Tensor, held: Held) -> None:
        """Too late for a copy. It must not be held either: it may lead to autograd's nodes, which lead back here."""
        names = [name for known in self.calls for name in known.names_of(held)] or ["?"]
        self.broken = (
            f"the call wrote to its input {names[0]} (shape {tuple(tensor.shape)}), which no call before had done, so no copy was made; "
            "later calls are given a copy to replay from"
        )
        self.held[held.index] = None

    def give_up(self) -> None:
        """A member raised. What it was given may be what an earlier one made, and lead through autograd's nodes back here."""
        self.inputs = {}
        self.close()

    def close(self) -> None:
        """No member will join any more."""
        self._made = None

    def check_replayable(self) -> None:
        """Raise if it is known that a replay would go wrong.

        Raises:
            ReplayError: says why.
        """
        if self.broken:
            raise ReplayError(f"region {self.region.name!r} cannot be replayed: {self.broken}")

    def call_of(self, index: int) -> Call:
        """The member call in which a tensor was saved."""
        if len(self.calls) == 1:
            return self.calls[0]
        return next(call for call in reversed(self.calls) if call.first <= index)

    def drop_values(self, *, given_only: bool = False) -> None:
        """Let go of what replays made, or of what backward has had of it: it is made again when it is asked for again."""
        drop_values(self.slots, given_only)


_NONE: list[Any] = []


def _working_copy(kept: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """A tensor that the replay may write to: no leaf, where the original was none."""
    if not requires_grad:
        return kept.detach().clone()
    with torch.enable_grad():
        return kept.detach().requires_grad_().clone()
