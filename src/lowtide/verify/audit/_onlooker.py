"""Watches the ops and the Python functions of regions while they run."""

from __future__ import annotations

import contextvars
import dis
import functools
from collections import deque
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from lowtide import _torch_private as private
from lowtide.engine import in_replay
from lowtide.engine._guards._ambient import _device_types as known_device_types
from lowtide.engine._sources import user_line
from lowtide.trace import facts_of, tensors_in
from lowtide.verify.audit._records import Kind

_READS_VALUES = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_select", "aten._unique")
_CONTAINERS = (list, dict, set, deque)
_SCALARS = (int, float, str, bool, type(None), tuple)
_CLOCKS = {"time": ("time", "perf_counter", "monotonic", "time_ns", "perf_counter_ns"), "datetime": ("now", "utcnow", "today")}
_MOST_ITEMS = 10_000
_ABSENT = object()
_NOT_PUT_BACK = "which torch.utils.checkpoint does not put back for a replay, as lowtide.checkpoint does"

Seen = tuple[Kind, str]


class Onlooker:
    """What the region that runs innermost does; to be pushed on the engine's tower.

    Attributes:
        warned: what has been warned of so far, to tell which op a warning is about.
        seen: of the innermost region: each thing once, in order.
        ops: how its call went, as a number that depends on every op.
    """

    def __init__(self, warned: list[Any]) -> None:
        self._warned = warned
        self._stack: list[_Call] = []

    def begin(self) -> None:
        """A region is entered."""
        self._stack.append(_Call(len(self._warned)))

    def watch_attributes(self, watches: Iterable[Any]) -> None:
        """See which attributes of these modules the region that was entered changes."""
        self._stack[-1].take_attributes(watches)

    def end(self) -> tuple[dict[Seen, None], int]:
        """The region is left: what it did, and a number for the way it went."""
        call = self._stack.pop()
        call.compare_attributes()
        self._see_warning(call)
        call.compare_globals()
        return call.seen, call.way

    @property
    def _current(self) -> _Call | None:
        here = self._stack and not in_replay() and not private.in_backward()
        return self._stack[-1] if here else None

    def see_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op is about to run."""
        call = self._current
        if call is None:
            return
        self._see_warning(call)
        facts = facts_of(func)
        call.way = hash((call.way, facts.name))
        call.running = facts.name, _devices([args, list(kwargs.values())]), len(self._warned)
        if facts.collective:
            call.note(Kind.COLLECTIVE, facts.name)
        if facts.name.startswith(_READS_VALUES):
            call.note(Kind.CONTROL_FLOW, f"values are read by {facts.name}")

    def see_result(self, result: Any) -> None:
        """It has run."""
        call = self._current
        if call is None:
            return
        name, before, _ = call.running
        for device in _devices([result]) - before if before else ():
            call.note(Kind.DEVICE, f"{name} moves to {device}" + ("" if _is_guarded(device) else ", which has no guard"))

    def _see_warning(self, call: _Call) -> None:
        """Torch gives warnings of an op when the call that made it returns: they are about the last op that was seen."""
        name, _, warned = call.running
        if any("does not have a deterministic" in str(w.message) for w in self._warned[warned:]):
            call.note(Kind.NONDETERMINISTIC, name)

    def see_python(self, frame: FrameType, event: str, arg: Any) -> None:
        """A function of the user's is called."""
        call = self._current
        if call is not None and event == "call":
            call.take_globals(frame)

    def see_compiled(self, frame: FrameType, event: str) -> None:
        """Of no interest."""

    def see_nothing_of_python(self) -> None:
        """Another profiler is at work."""


class _Call:
    """One call of a region."""

    def __init__(self, warned: int) -> None:
        self.seen: dict[Seen, None] = {}
        self.way = 0
        self.running: tuple[str, set[torch.device], int] = ("", set(), warned)
        self._globals: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
        self._attributes: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._watches: list[Any] = []

    def note(self, kind: Kind, what: str) -> None:
        """Each thing once."""
        self.seen.setdefault((kind, what))

    def take_globals(self, frame: FrameType) -> None:
        """What a function may change or read besides what it is given."""
        table = frame.f_globals
        for name in frame.f_code.co_names:
            value = table.get(name)
            if isinstance(value, contextvars.ContextVar):
                self.note(Kind.AMBIENT, f"context variable {value.name}")
            elif _reads_clock(name, value, frame.f_code):
                self.note(Kind.SIDE_EFFECT, f"the clock is read at {user_line(frame)}")
            elif isinstance(value, _CONTAINERS) and len(value) <= _MOST_ITEMS:
                self._globals.setdefault((id(table), name), (table, value, _copy(value)))
        for name in _rebinds(frame.f_code):
            self._globals.setdefault((id(table), name), (table, table.get(name), None))

    def take_attributes(self, watches: Iterable[Any]) -> None:
        """Those of modules, as the engine lists them."""
        self._watches = list(watches)
        for own, name in (place for watch in self._watches for place in watch.attributes()):
            value = own[name]
            self._attributes[id(own), name] = value, _copy(value) if isinstance(value, _CONTAINERS) else None

    def compare_attributes(self) -> None:
        """Note those that are not what they were, and new ones."""
        for watch in self._watches:
            for own, name in watch.attributes():
                value, copy = self._attributes.get((id(own), name), (_ABSENT, None))
                if own[name] is not value or (copy is not None and not _is_same(value, copy)):
                    self.note(Kind.SIDE_EFFECT, f"{watch.path_of(own, name)} is changed, {_NOT_PUT_BACK}")

    def compare_globals(self) -> None:
        """Note those that are not what they were."""
        for (_, name), (table, value, copy) in self._globals.items():
            if table.get(name) is not value or (copy is not None and not _is_same(value, copy)):
                self.note(Kind.GLOBAL, name)


def _devices(tree: Any) -> set[torch.device]:
    return {tensor.device for tensor in tensors_in(tree)}


def _is_guarded(device: torch.device) -> bool:
    """Whether guards take the state of the device's generator."""
    return device.type in known_device_types()


def _reads_clock(name: str, value: Any, code: CodeType) -> bool:
    """Whether a global that a function names is a clock, or a module whose clock it names as well."""
    module = getattr(value, "__name__", "") if type(value).__name__ in ("module", "type") else ""
    if module in _CLOCKS:
        return any(clock in code.co_names for clock in _CLOCKS[module])
    return getattr(value, "__module__", None) == "time" and name in _CLOCKS["time"]


@functools.lru_cache(maxsize=4096)
def _rebinds(code: CodeType) -> tuple[str, ...]:
    return tuple({i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"})


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _is_same(value: Any, copy: Any) -> bool:
    now = _copy(value)
    if len(now) != len(copy):
        return False
    pairs = zip(now.items(), copy.items(), strict=True) if isinstance(now, dict) else zip(enumerate(now), enumerate(copy), strict=True)
    return all(one[0] == other[0] and (one[1] is other[1] or _equal(one[1], other[1])) for one, other in pairs)


def _equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and isinstance(one, _SCALARS) and one == other
