"""What replaying each module would free, and why it frees nothing where it does not."""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import numpy as np

from lowtide.errors import InvalidInputError, PlanError
from lowtide.explain._peak import moment
from lowtide.explain._step import StepView, node_of, path_name
from lowtide.explain._where import PeakIn, described, peak_in
from lowtide.plan import PlannedRegion, Simulation
from lowtide.plan.reading import NEVER, Replay, TraceIndex, replays_of, run
from lowtide.records import Phase, StepTrace
from lowtide.units import format_bytes

_NOTHING_SHARE = 0.1
"""Freed bytes below this share of what a region saves count as nothing."""
_UNMOVED_SHARE = 0.01
"""A peak that falls by less than this share has not moved."""
_FUSED_ATTENTION = re.compile(r"_(scaled_dot_product|)_?(flash|efficient|cudnn|fused)\w*attention|_flash_attention|_efficient_attention")


class Cause(str, Enum):
    """Why a replay frees nothing."""

    NOTHING_SAVED = "nothing saved"
    REGION_INPUT = "region input"
    VIEW_OF_KEPT = "view of something kept"
    KEPT_BY_NEIGHBOUR = "kept by a neighbour"
    KEPT_BY_LOSS = "kept by the loss"
    KEPT_BY_USER = "kept by the user"
    INPUT_HELD = "input held for the replay"
    FUSED_ATTENTION = "fused attention"
    PEAK_ELSEWHERE = "peak elsewhere"
    REPLAYED_AT_PEAK = "back at the peak"
    NOT_REPLAYABLE = "not replayable"


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause, with the bytes that it accounts for and a sentence about them.

    Attributes:
        cause: which.
        bytes: saved bytes of the region that stay because of it; 0 where it is not about single tensors.
        text: a sentence.
        peak_in: where the peak is, for ``PEAK_ELSEWHERE``.
    """

    cause: Cause
    bytes: int
    text: str
    peak_in: PeakIn | None = None


@dataclass(frozen=True, slots=True)
class RegionReplay:
    """What replaying a module, or several that are alike, does to the step.

    Attributes:
        paths: of the modules; each is a region of its own.
        type: class name.
        saved_bytes: storages that autograd keeps for calls of them; parameters left out.
        freed_bytes: what is gone when forward turns into backward, less what is held for the replays.
        peak_fall_bytes: how far the peak of the step falls when all of ``paths`` are replayed and nothing else.
        replay_s: time of the replays.
        reasons: why that is next to nothing, the most bytes first; empty where it is not.
    """

    paths: tuple[str, ...]
    type: str
    saved_bytes: int
    freed_bytes: int
    peak_fall_bytes: int
    replay_s: float
    reasons: tuple[Reason, ...]

    @property
    def helps(self) -> bool:
        """Whether replaying lowers the peak."""
        return not self.reasons

    @property
    def name(self) -> str:
        """The paths in one text."""
        names = [path_name(path) for path in self.paths]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def region_replays(trace: StepTrace, paths: tuple[str, ...] | None = None, *, most: int = 24) -> tuple[RegionReplay, ...]:
    """Say for every module what its replay frees, and why where it frees nothing.

    Args:
        trace: of the step.
        paths: of modules, each explained by itself; without them, all modules that save something, those that differ
            only in a number of their path together.
        most: how many rows: those that save the most.

    Raises:
        InvalidInputError: the traced step never calls one of the modules.
    """
    reader = _Reader(trace)
    groups = [(path,) for path in paths] if paths is not None else reader.alike(most)
    return tuple(reader.explain(group) for group in groups)


class _Reader:
    """One trace with what explaining its regions needs over and over."""

    def __init__(self, trace: StepTrace) -> None:
        self.view, self.index = StepView(trace), TraceIndex(trace)
        self.before = run(self.index, ())
        self._backward = np.flatnonzero([op.phase is Phase.BACKWARD for op in trace.ops])

    def alike(self, most: int) -> list[tuple[str, ...]]:
        """Modules grouped by path but for numbers, and by class; the groups that save the most first."""
        groups: dict[tuple[str, str], dict[str, None]] = {}
        for call in self.view.trace.calls:
            groups.setdefault((re.sub(r"\d+", "#", call.path), call.type), {})[call.path] = None
        found = [self._apart(list(group)) for group in groups.values()]
        sized = sorted(((self._saved_bytes(group), -i, group) for i, group in enumerate(found)), reverse=True)
        return [group for size, _, group in sized[:most] if size]

    def _apart(self, paths: list[str]) -> tuple[str, ...]:
        """Without those whose calls run inside calls of another: regions of one plan cannot overlap."""
        kept: list[str] = []
        taken: list[tuple[int, int]] = []
        for path in paths:
            spans = [(call, int(self.index.call_stop[call])) for call in self.index.calls_of_path[path]]
            if not any(_touches(span, taken) for span in spans):
                kept.append(path)
                for span in spans if not _nested(spans) else spans[:1]:
                    insort(taken, span)
        return tuple(kept)

    def _slots(self, paths: Collection[str]) -> list[int]:
        calls = [c for path in paths for c in self.index.calls_of_path[path]]
        return sorted({int(slot) for call in calls for slot in self.index.slots_of_call(call)})

    def _saved(self, paths: Collection[str]) -> list[int]:
        """Storages kept for these modules; of what was there before the step only inputs."""
        storages = dict.fromkeys(self.view.trace.saved[slot].storage for slot in self._slots(paths))
        return [s for s in storages if self.view.is_activation(s)]

    def _saved_bytes(self, paths: Collection[str]) -> int:
        return self.view.bytes_of(self._saved(paths))

    def explain(self, paths: tuple[str, ...]) -> RegionReplay:
        for path in paths:
            if path not in self.index.calls_of_path:
                raise InvalidInputError(f"the traced step calls no module {path!r}: give the path of a module that it runs")
        kind, saved = self.index.trace.calls[self.index.calls_of_path[paths[0]][0]].type, self._saved_bytes(paths)
        try:
            replays = [replay for path in paths for replay in replays_of(self.index, (path,))]
        except PlanError as error:
            return RegionReplay(paths, kind, saved, 0, 0, 0.0, (Reason(Cause.NOT_REPLAYABLE, saved, str(error)),))
        after = run(self.index, [PlannedRegion((path,)) for path in paths])
        freed, fall = self._freed_bytes(replays), self.before.peak_bytes - after.peak_bytes
        reasons = self._reasons(frozenset(paths), replays, after, freed)
        return RegionReplay(paths, kind, saved, freed, fall, after.added_s, tuple(reasons))

    def _freed(self, replays: list[Replay]) -> dict[int, int]:
        """Storages that are gone when forward turns into backward, and the op before which they are gone."""
        dropped = {int(slot) for replay in replays for slot in replay.dropped}
        held: dict[int, int] = {}
        for replay in replays:
            held.update({s: max(held.get(s, 0), until) for s, until in _held(replay)})
        found: dict[int, int] = {}
        for storage in {self.view.trace.saved[slot].storage for slot in dropped}:
            kept = [self.view.trace.saved[s].released for s in self.view.slots_of_storage[storage] if s not in dropped]
            until = max(int(self.view.natural_end[storage]), held.get(storage, 0), *kept, 0)
            if until <= self._turn(storage) < self.view.end[storage]:
                found[storage] = until
        return found

    def _freed_bytes(self, replays: list[Replay]) -> int:
        return self.view.bytes_of(self._freed(replays)) - self.view.bytes_of(self._held_longer(replays))

    def _held_longer(self, replays: list[Replay]) -> list[int]:
        """Inputs of regions that would be gone earlier, were they not wanted for the replay."""
        return [s for replay in replays for s, until in _held(replay) if self.view.end[s] <= self._turn(s) < until]

    def _turn(self, storage: int) -> int:
        """The first op of backward after a storage was made."""
        at = int(np.searchsorted(self._backward, self.view.born[storage]))
        return int(self._backward[at]) if at < len(self._backward) else len(self.view.trace.ops)

    def _reasons(self, paths: frozenset[str], replays: list[Replay], after: Simulation, freed: int) -> list[Reason]:
        saved = self._saved_bytes(paths)
        if not self._slots(paths):
            return [Reason(Cause.NOTHING_SAVED, 0, "autograd saves nothing here: there is nothing to free")]
        if freed > _NOTHING_SHARE * saved:
            return self._unmoved(after, replays, freed)
        return [
            *sorted(self._kept(paths, replays), key=lambda r: -r.bytes),
            *self._fused(paths),
            *self._unmoved(after, replays, freed)[: not saved],
        ]

    def _kept(self, paths: frozenset[str], replays: list[Replay]) -> Iterator[Reason]:
        """The saved storages that stay, by what keeps them."""
        freed, groups = self._freed(replays), dict[Cause, list[int]]()
        inputs = {s for p in paths for c in self.index.calls_of_path[p] for s in self.index.trace.calls[c].inputs}
        for storage in dict.fromkeys(self.view.trace.saved[slot].storage for slot in self._slots(paths)):
            cause = None if storage in freed else self._cause(storage, paths, inputs)
            if cause is not None:
                groups.setdefault(cause, []).append(storage)
        longer = self._held_longer(replays)
        if longer:
            groups.setdefault(Cause.INPUT_HELD, []).extend(longer)
        for cause, storages in groups.items():
            yield Reason(cause, self.view.bytes_of(storages), self._texts()[cause](storages, paths))

    def _cause(self, storage: int, paths: frozenset[str], inputs: set[int]) -> Cause | None:
        record = self.view.trace.storages[storage]
        if record.resident:
            return Cause.REGION_INPUT if storage in inputs else None
        if not self._born_inside(storage, paths):
            return Cause.REGION_INPUT
        outside = [s for s in self.view.slots_of_storage[storage] if not self._is_slot_of(s, paths)]
        if not outside:
            return Cause.KEPT_BY_USER
        if any(self.view.trace.saved[s].call is None for s in outside):
            return Cause.KEPT_BY_LOSS
        sizes = {self.view.trace.saved[s].bytes for s in self.view.slots_of_storage[storage]}
        return Cause.VIEW_OF_KEPT if len(sizes) > 1 else Cause.KEPT_BY_NEIGHBOUR

    def _born_inside(self, storage: int, paths: frozenset[str]) -> bool:
        return _is_inside_one(self.view.owner(storage), paths)

    def _is_slot_of(self, slot: int, paths: frozenset[str]) -> bool:
        return _is_inside_one(self.view.path_of_call(self.view.trace.saved[slot].call), paths)

    def _texts(self) -> dict[Cause, Callable[[list[int], frozenset[str]], str]]:
        return {
            Cause.REGION_INPUT: lambda s, _: (
                f"{self._size(s)} of what it saves are its inputs: they are there when the replay begins, so they have to stay"
            ),
            Cause.VIEW_OF_KEPT: lambda s, p: (
                f"{self._size(s)} of what it saves lie in storages of which {self._savers(s, p)} "
                "keeps a view: a storage goes as a whole or not at all"
            ),
            Cause.KEPT_BY_NEIGHBOUR: lambda s, p: (
                f"{self._size(s)} of what it saves is saved by {self._savers(s, p)} as well: replay both as one segment"
            ),
            Cause.KEPT_BY_LOSS: lambda s, p: f"{self._size(s)} of what it saves is saved by the loss as well ({self._savers(s, p)})",
            Cause.KEPT_BY_USER: lambda s, _: (
                f"{self._size(s)} of what it saves stays alive in a variable until backward wants it "
                f"({self._last_line(s)}): dropping it frees nothing"
            ),
            Cause.INPUT_HELD: lambda s, _: f"the replay needs inputs of {self._size(s)} that would otherwise be gone",
        }

    def _size(self, storages: list[int]) -> str:
        return format_bytes(self.view.bytes_of(storages))

    def _savers(self, storages: list[int], paths: frozenset[str]) -> str:
        slots = [s for storage in storages for s in self.view.slots_of_storage[storage] if not self._is_slot_of(s, paths)]
        tensors = [self.view.trace.saved[s] for s in slots]
        names = dict.fromkeys(
            node_of(t) if t.call is None else f"{node_of(t)} of {path_name(self.view.path_of_call(t.call))}" for t in tensors
        )
        shown = list(names)[:2]
        return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")

    def _last_line(self, storages: list[int]) -> str:
        largest = max(storages, key=lambda s: int(self.view.bytes[s]))
        maker = self.view.maker(largest)
        return f"made at {maker.source or maker.name}" if maker else "there before the step"

    def _fused(self, paths: frozenset[str]) -> list[Reason]:
        ops = [op for i, op in enumerate(self.view.trace.ops) if self.index.forward[i] and self._runs_in(op.call, paths)]
        fused = next((op.name for op in ops if _FUSED_ATTENTION.search(op.name)), None)
        if fused is None:
            return []
        text = f"{fused} never makes the matrix of attention weights: it saves queries, keys, values and its result, not their product"
        return [Reason(Cause.FUSED_ATTENTION, 0, text)]

    def _runs_in(self, call: int | None, paths: frozenset[str]) -> bool:
        return _is_inside_one(self.view.path_of_call(call), paths)

    def _unmoved(self, after: Simulation, replays: list[Replay], freed: int) -> list[Reason]:
        """Why the peak is where it was although bytes are freed."""
        if self.before.peak_bytes - after.peak_bytes > _UNMOVED_SHARE * self.before.peak_bytes:
            return []
        line = after.timeline
        at = int(line.op[after.peak_moment])
        if line.replay[after.peak_moment] != NEVER or 2 * _back_bytes(replays, at) > freed:
            return [Reason(Cause.REPLAYED_AT_PEAK, 0, "the peak comes when this has been replayed: all that was freed is back by then")]
        peak = moment(self.view, at)
        where = peak_in(self.view, peak)
        return [Reason(Cause.PEAK_ELSEWHERE, 0, f"the peak is elsewhere, {described(peak)}: mostly {where.value}", where)]


def _is_inside_one(path: str | None, paths: frozenset[str]) -> bool:
    """``is_inside`` for one of several, however many they are."""
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path is not None and path in paths


def _touches(span: tuple[int, int], taken: list[tuple[int, int]]) -> bool:
    """Whether a span overlaps one of those taken, which lie apart and in order."""
    at = bisect_left(taken, span)
    return (at > 0 and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1])


def _nested(spans: list[tuple[int, int]]) -> bool:
    """A module that calls itself."""
    return any(later[0] < earlier[1] for earlier, later in pairwise(spans))


def _back_bytes(replays: list[Replay], at: int) -> int:
    """What replays before this op made again and backward still wants."""
    ran = (r for r in replays if r.before != NEVER and r.before <= at)
    return sum(int(r.index.bytes[r.born[r.kept_until > at]].sum()) for r in ran)


def _held(replay: Replay) -> list[tuple[int, int]]:
    return list(zip(replay.held.tolist(), replay.held_until.tolist(), strict=True))
