"""Watching one call op by op, to learn what its replays need. The first call of a region is watched, and one in many after it.

What is learned in the first call also holds for the first call: a tensor that the call writes to is copied just before it
is written, and what the objects it can reach were is noted when it is entered. The watching itself is a dispatch mode and a
profile function; both are far too slow to stay on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide import _torch_compiler as torch_compiler
from lowtide import _torch_private as private
from lowtide.engine._guards._outside import read
from lowtide.engine._guards._random import Random, moved, take_random
from lowtide.engine._guards._running import heard_by
from lowtide.engine._guards._statistics import names_statistics, read_by
from lowtide.engine._kept._keeping import holding_for, run_holding
from lowtide.engine._kept._learned import COLLECTIVES
from lowtide.engine._kept._sites import Sites
from lowtide.engine._learning import Before
from lowtide.engine._meeting import Meeting
from lowtide.engine._op_tensors import tensors_of_op
from lowtide.engine._own import own_attribute
from lowtide.engine._profile import Script
from lowtide.engine._replay import tell_once
from lowtide.engine._slot import gone
from lowtide.engine._sources import calling_frame, is_importing, is_library, site_of, user_line
from lowtide.engine._state import has_state
from lowtide.engine._tower import is_blind, tower
from lowtide.engine._transforms import transforms_allowed, transforms_met
from lowtide.engine._tree import mutable_types
from lowtide.engine._unpack import unpack
from lowtide.engine._values import hash_of, meta_of

if TYPE_CHECKING:
    from lowtide.engine._call import Call
    from lowtide.engine._frame import Frame
    from lowtide.engine._kept._learned import Learned

_MOST_SCRIPTS = 64
_GENERATOR = 0x20
_TELLING_DEVICES = frozenset({"cpu", "cuda"})


class Audit:
    """One watched call."""

    def __init__(self, frame: Frame, call: Call, target: Callable[..., Any], learned: Learned | None = None) -> None:
        self._frame = frame
        self._call = call
        self._script = Script()
        policy = frame.region.options.policy
        self._learned = learned
        self._sites = None if policy is None else Sites(call, _owner_of(call, target), frame.region.name)
        self._watcher = _Watcher(frame, call, self._script, self._sites)
        call.profile.outside.prune()
        self._meeting = Meeting(call)
        self._random_code = False
        self._may_read_statistics = False
        self._inside = {id(own) for watch, _ in call.watches for own in watch.dictionaries()} if call.python_state else set()
        self._prints = ""

    def run(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, and let its profile know what was seen."""
        frame, call = self._frame, self._call
        if torch_compiler.entry() is not None:
            import lowtide.engine._compiled  # noqa: F401 – has the compiler leave the engine's own code alone
        changeable = mutable_types()
        self._script.first = all(tensor.is_leaf for tensor, _ in frame.inputs.values())
        # As later calls show them, before the callable is taken apart deeper than they take it.
        self._flags, self._way = call.flags(), call.way()
        with tower.silence():
            before = Before(frame, call, target, args, kwargs)
        self._watcher.before = self._meeting.before = before
        if frame.hashes is None:
            frame.hashes = {}
        transforms = transforms_met()
        with transforms_allowed():
            result = self._run_watched(target, args, kwargs)
        call.profile.transforms = call.profile.transforms or transforms_met() > transforms
        with tower.silence():
            self._note_named()
            before.learn(self._random_code)
            call.profile.meets = call.profile.meets or self._meeting.must_go_on()
        self._learn_script()
        if before.is_news or mutable_types() != changeable:
            call.profile.left = 0  # more will be taken apart from now on: what was learned of places among all that is, is learned again
        if self._sites is not None and frame.region.options.policy is not None:
            self._sites.learn(frame.region.options.policy)
        return result

    def _run_watched(self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pack = self._frame.pack_hook()
        holding = holding_for(self._frame, self._call, self._learned, pack)
        hook = self._watcher.pack_hook(pack if holding is None else holding.pack)
        private.push_hooks(self._frame.mark(hook if holding is None else holding.listen_to(hook)), unpack)
        try:
            with tower.watching(self), heard_by(self._meeting), nullcontext() if self._sites is None else self._sites.watching():
                return target(*args, **kwargs) if holding is None else run_holding(holding, target, args, kwargs)
        finally:
            private.pop_hooks()

    def see_nothing_of_python(self) -> None:
        """Another profiler is at work: take it that everything matters."""
        self._script.settled = sys.maxsize
        self._watcher.attention = self._may_read_statistics = True

    def see_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to run."""
        self._watcher.see(func, args, kwargs)

    def see_result(self, result: Any) -> None:
        """It has run."""
        self._watcher.see_result(result)

    def see_python(self, frame: FrameType, event: str, arg: Any) -> None:
        """Called where a function begins or ends: notes user code that runs after itself, draws at random, or writes output."""
        if event == "c_call":
            self._see_builtin(frame, arg.__name__)
        elif event == "return":
            with tower.silence():
                self._call.profile.outside.note_end(frame, self._inside)
                self._read_outside()
        elif not is_importing(frame):  # which happens once: no replay will do it
            code = frame.f_code
            self._random_code = self._random_code or _names_randomness(code, frame.f_globals)
            self._may_read_statistics = self._may_read_statistics or names_statistics(code)
            self._note_outside(frame)
            if code.co_flags & _GENERATOR or code.co_name == "__exit__" or _is_hook(frame):
                self._script.settled = len(self._script.ops)

    def see_compiled(self, frame: FrameType, event: str) -> None:
        """Compiled code is entered or left: in later calls nobody will see what it calls, so policies are not asked about that."""
        if self._sites is not None:
            self._sites.see_compiled(frame, event)

    def _note_outside(self, frame: FrameType) -> None:
        """A function of the user's begins: what it reads from elsewhere is looked at from now on."""
        with tower.silence():
            self._call.profile.outside.note(frame, self._inside)
            self._read_outside()

    def _note_named(self) -> None:
        """The call is over: it may go another way next time."""
        for function in self._call.profile.outside.note_named(self._inside):
            self._random_code = self._random_code or _names_randomness(function.__code__, function.__globals__)
            self._may_read_statistics = self._may_read_statistics or names_statistics(function.__code__)

    def _read_outside(self) -> None:
        outside, call = self._call.profile.outside, self._call
        known = {(id(place.owner()), place.name) for place, _, _ in call.outside}
        met = call.met
        for place in chain(outside.places, outside.places_in(met)):
            if (id(place.owner()), place.name) not in known and not self._watcher.made(place.read()):
                call.outside.append(read(place, call.module, met.append))
                value = call.outside[-1][1]
                if has_state(type(value)):
                    call.state(value)
        if self._watcher.before is not None:
            self._watcher.before.note_watches()
        call.take_states(outside)

    def _see_builtin(self, frame: FrameType, name: str) -> None:
        if "attention" in name:
            self._watcher.attention = True
        elif not self._prints and not is_importing(frame):
            direct = not is_library(frame.f_code.co_filename)
            if direct or frame.f_code.co_name == "emit":
                self._prints = f"{name} at {user_line(frame)}"

    def _learn_script(self) -> None:
        frame, call, script = self._frame, self._call, self._script
        profile = call.profile
        self._watcher.settle()
        profile.outside.prune()
        script.plain = [0 if ref is None else 1 for ref in frame.slots[call.first :]]
        for place in self._watcher.sent:
            ref = frame.slots[call.first + place]
            slot = None if ref is None else ref()
            if slot is not None:
                script.plain[place], slot.ref = 2, gone
        script.others = {place for place, kind in enumerate(script.plain) if kind == 1}
        script.settle()
        watched = bool(profile.scripts)
        key = frame.key_of(call)
        if len(profile.scripts) < _MOST_SCRIPTS or key in profile.scripts:
            profile.scripts[key] = script
        profile.attention = self._watcher.attention or is_blind() or (profile.attention and watched)
        profile.torch_random = profile.torch_random or self._watcher.random
        profile.flags.add(self._flags)
        profile.left = frame.region.options.audit_every or sys.maxsize
        script.trained = call.trained
        for watch, taken in call.watches:
            watch.audited = True
            watch.ways.add(self._way)
            if taken[2] not in watch.trainings:
                watch.trainings.append(taken[2])
            watch.statistics.note_read(profile.number, taken[2], None if self._may_read_statistics else self._watcher.read)
        if self._prints:
            tell_once(
                profile,
                f"region {frame.region.name!r} writes output ({self._prints}), which its replay does again: "
                "write it only `if not lowtide.is_replaying()`",
            )


class _Watcher:
    """Sees every op of the call, below autograd.

    Attributes:
        before: told of what is about to be written.
        random: an op drew from a generator of torch.
        attention: attention ops were seen.
        read: the memory that ops read, see ``read_by``.
        sent: places whose memory was given to a collective, or made by one: the thread that sends it lets go of it some time, sooner on one
            process than on another. All have to replay alike, so nobody may count on such a tensor to be there.
    """

    def __init__(self, frame: Frame, call: Call, script: Script, sites: Sites | None) -> None:
        self.before: Before | None = None
        self.random = False
        self.attention = False
        self._sends = False
        self._frame = frame
        self._script = script
        self._sites = sites
        self._count = 0
        self._last = ""
        self._born: set[int] = set()
        self._given: set[int] = set()
        self._sizes: list[int] = []
        self._drawing: Random | None = None
        self._pending: list[tuple[int, int]] = []
        self._sent: set[int] = set()
        self.sent: set[int] = set()
        self.read: set[int] = set()

    def pack_hook(self, pack: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        """The frame's pack hook, with notes taken."""
        frame, script = self._frame, self._script

        def note(tensor: torch.Tensor) -> Any:
            tower.quiet += 1
            try:
                hashes = frame.hashes
                if hashes is not None:
                    hashes[len(frame.slots)] = hash_of(tensor)
                self._pending.append((len(script.ops), private.storage_key(tensor)))
                if self._sent and private.storage_key(tensor) in self._sent:
                    self.sent.add(len(script.ops))
                script.ops.append(self._last)
                frame.sites.append(site_of(calling_frame(sys._getframe(1))))
                script.grads.append(tensor.requires_grad)
                script.strides.append(meta_of(tensor)[2])
                script.positions.append(self._count)
                script.sources.append(user_line(sys._getframe(1)))
                return pack(tensor)
            finally:
                tower.quiet -= 1

        return note

    def see(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to run: which saved tensors belong to it, what it writes to, whether it draws at random."""
        self._last = str(func)
        self._count += 1
        given = self._given = {private.storage_key(tensor) for tensor in tensors_of_op((args, list(kwargs.values())))}
        self.read |= read_by(func, args, kwargs)
        for index, key in self._pending:
            if key in given:
                self._script.ops[index] = self._last
        self._drawing = take_random() if torch.Tag.nondeterministic_seeded in func.tags else None
        self._sizes = [tensor.numel() for tensor in tensors_of_op((args, list(kwargs.values())))]
        self.attention = self.attention or "attention" in self._last
        self._sends = func.namespace in COLLECTIVES
        if self._sends:
            self._sent |= given
        written = _written(func, args, kwargs)
        if self._sites is not None:
            self._sites.see_op(func, written)
        filled = _filled(func, args, kwargs) if self._pending and written else set()
        for tensor in written:
            key = private.storage_key(tensor)
            if key in filled:
                self._script.late.update(index for index, saved in self._pending if saved == key)
            for call in tower.unwatched:
                if not call.audited:  # nobody else sees that it writes to it
                    call.about_to_write(key)
            if key not in self._born and self.before is not None:
                self.before.about_to_write(tensor, key)
        self._pending.clear()

    def see_result(self, result: Any) -> None:
        """What the op made is the call's own: it may write to it. A view of what the op was given is not."""
        tensors = tensors_of_op(result)
        made = {private.storage_key(tensor) for tensor in tensors} - self._given
        self._born.update(made)
        if self._sends:
            self._sent |= made
        self._script.work.append(_work([*self._sizes, *(tensor.numel() for tensor in tensors)]))
        if self._drawing is not None:
            # Attention says that it is random even where nothing is dropped. Generators of other devices may not show that they moved.
            known = all(tensor.device.type in _TELLING_DEVICES for tensor in tensors)
            self.random = self.random or not known or moved(self._drawing)
        if self._sites is not None:
            self._sites.see_result(made)

    def made(self, value: Any) -> bool:
        """Whether this is a tensor that the call itself has made. To hold it would be a cycle through autograd's nodes."""
        return isinstance(value, torch.Tensor) and private.storage_key(value) in self._born

    def settle(self) -> None:
        """The call is over."""
        self._pending.clear()
        self._frame = None  # type: ignore[assignment]


def _work(sizes: list[int]) -> float:
    """How much an op may have to do: of a matrix multiplication, the number of multiplications; of others, more than there is."""
    return math.sqrt(math.prod(sorted(sizes)[-3:]))


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Tensors that an op writes to. Batch norm does not say that it updates its statistics, nor do collectives of what they fill."""
    schema = func._schema
    found: list[torch.Tensor] = []
    if schema.is_mutable:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tensors_of_op(args[index] if index < len(args) else kwargs.get(argument.name))
    if "batch_norm" in schema.name and "backward" not in schema.name:
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        found = found + tensors_of_op(args[3:5]) if named.get("training", "_no_update" not in schema.name) else []
    if func.namespace == "c10d":
        found += tensors_of_op((args, list(kwargs.values())))
    return found


def _filled(func: Any, args: Any, kwargs: Any) -> set[int]:
    """Memory that an op fills by the way, as noise for its own backward. What it returns changed, the user wanted changed."""
    schema = func._schema
    if schema.name.endswith("_") and not schema.returns:
        return set()
    returned = {name for result in schema.returns if result.alias_info is not None for name in result.alias_info.before_set}
    found: set[int] = set()
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write and not returned & alias.before_set:
            values = tensors_of_op(args[index] if index < len(args) else kwargs.get(argument.name))
            found.update(private.storage_key(tensor) for tensor in values if not tensor.requires_grad)
    return found


def _owner_of(call: Call, target: Any) -> nn.Module | None:
    owner = target if isinstance(target, nn.Module) else own_attribute(target, "__self__")
    return owner if call.fixed and isinstance(owner, nn.Module) else None


def _is_hook(frame: FrameType) -> bool:
    """Whether a function is a module's hook: called by ``Module.__call__``, but not its forward."""
    caller = frame.f_back
    return (
        caller is not None
        and caller.f_code.co_name in ("_call_impl", "inner")
        and frame.f_code.co_name != "forward"
        and is_library(caller.f_code.co_filename)
    )


def _names_randomness(code: CodeType, table: dict[str, Any]) -> bool:
    """Whether a function may draw from Python's or NumPy's global generator: it names one of them, or a function of theirs."""
    import random

    import numpy as np

    for name in code.co_names:
        value = table.get(name)
        if value is random or value is np.random or (name == "random" and not isinstance(value, type(torch.sin))):
            return True
        owner = own_attribute(value, "__self__")
        if isinstance(owner, (random.Random, np.random.RandomState)):
            return True
    return False
