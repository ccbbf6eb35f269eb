"""What replaying a region does to a step: what it drops, what it holds, what runs again and when.

This is the reading of the engine's semantics that executor and solvers share; how the bytes add up over time is worked out
by each of them on its own. All of it depends on one region alone, never on what else a plan replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._index import CATEGORIES, NEVER, Ints, TraceIndex, ints


@dataclass(frozen=True)
class Replay:
    """One occurrence of a region in the step, with its replay.

    Attributes:
        region: paths of the region.
        calls: its member calls, in order.
        dropped: saved tensors that are not kept; the original's storage is no longer held for them.
        held, held_until: storages of the region's inputs, and the op before which it lets go of them.
        before: the replay runs in the gap before this op; ``NEVER`` if nothing is replayed.
        first_slot: of the saved tensors asked for there, the first; orders replays in one gap.
        ops: ops that run again, in order.
        born: storages that these ops allocate anew.
        dies: for each of ``born``, the place in ``ops`` before which it is gone; ``len(ops)`` if it lives to the end.
        kept_until: for each of ``born``, the op of the step before which backward has let go of it; ``NEVER`` if
            no saved tensor needs it.
    """

    region: tuple[str, ...]
    calls: tuple[int, ...]
    dropped: Ints
    held: Ints
    held_until: int
    before: int
    first_slot: int
    ops: Ints
    born: Ints
    dies: Ints
    kept_until: Ints
    index: TraceIndex

    @cached_property
    def seconds(self) -> float:
        """Time of the ops that run again."""
        return float(self.index.seconds[self.ops].sum())

    @cached_property
    def live_bytes(self) -> Ints:
        """Bytes of what the replay allocated, alive while each of ``ops`` runs: ``(len(ops), len(CATEGORIES))``."""
        change = np.zeros((len(self.ops) + 1, len(CATEGORIES)), dtype=np.int64)
        category, size = self.index.category[self.born], self.index.bytes[self.born]
        ends = np.where(self.kept_until == NEVER, self.dies, len(self.ops))
        np.add.at(change, (np.searchsorted(self.ops, self.index.born[self.born]), category), size)
        np.subtract.at(change, (ends, category), size)
        return change.cumsum(axis=0)[:-1]

    @cached_property
    def peak_bytes(self) -> int:
        """Most bytes the replay adds while one of ``ops`` runs, with that op's workspace."""
        if not len(self.ops):
            return 0
        return int((self.live_bytes.sum(axis=1) + self.index.workspace[self.ops]).max())


def replays_of(index: TraceIndex, paths: tuple[str, ...]) -> list[Replay]:
    """Every occurrence of a region in the step.

    Raises:
        PlanError: a path that was never called, members that never run one after the other, or a call that
            cannot be replayed.
    """
    found = occurrences(index, paths)
    for call in (c for calls in found for c in calls if not index.replayable[c]):
        path = index.trace.calls[call].path
        raise PlanError(f"region {name_of(paths)} cannot be replayed: the call of {path!r} may not run twice; leave it out of the plan")
    return [_read(index, paths, calls) for calls in found]


def occurrences(index: TraceIndex, paths: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of calls that are replayed as one: runs of the paths as consecutive siblings, and member calls outside of any run."""
    for path in paths:
        if path not in index.calls_of_path:
            raise PlanError(
                f"the plan has a region {path!r}, but the traced step calls no such module: make a plan from a trace of this step"
            )
    members = [c for path in paths for c in index.calls_of_path[path]]
    found = [] if len(paths) == 1 else _runs(index, paths, sorted({int(index.parent[c]) for c in members}))
    if len(paths) > 1 and not found:
        raise PlanError(f"region {name_of(paths)}: these modules never run one after the other in one call, so they are no region")
    in_run = {c for run in found for c in run}
    return _outermost(index, sorted(found + [(c,) for c in members if c not in in_run]))


def _runs(index: TraceIndex, paths: tuple[str, ...], parents: list[int]) -> list[tuple[int, ...]]:
    found = []
    for parent in parents:
        siblings = index.children[parent]
        called = [index.trace.calls[c].path for c in siblings]
        at = 0
        while at + len(paths) <= len(siblings):
            here = tuple(called[at : at + len(paths)]) == paths
            if here:
                found.append(tuple(siblings[at : at + len(paths)]))
            at += len(paths) if here else 1
    return found


def _outermost(index: TraceIndex, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without the groups inside an earlier one: a module that calls itself is replayed with its outermost call."""
    kept: list[tuple[int, ...]] = []
    stop = 0
    for calls in groups:
        if calls[0] >= stop:
            kept.append(calls)
            stop = int(index.call_stop[calls[-1]])
    return kept


def name_of(paths: tuple[str, ...]) -> str:
    """A region as people read it: ``blocks.0``, or ``blocks.0 … blocks.3``."""
    first, last = (repr(p) if p == "" else p for p in (paths[0], paths[-1]))
    return first if len(paths) == 1 else f"{first} … {last}"


def _read(index: TraceIndex, paths: tuple[str, ...], calls: tuple[int, ...]) -> Replay:
    member_ops = _member_ops(index, calls)
    slots = _slots_born_inside(index, calls, member_ops)
    before = _first_need(index, slots)
    dropped = _dropped(index, slots, before)
    needed = dropped[index.used[dropped] != NEVER] if before != NEVER else dropped[:0]
    ops = _ops_to_run(index, member_ops, needed, before)
    born = index.storages_born_in(ops)
    asked = needed[index.used[needed] == before]
    return Replay(
        region=paths,
        calls=calls,
        dropped=dropped,
        held=_inputs(index, calls) if len(dropped) else ints(()),
        held_until=int(index.released[dropped].max(initial=0)),
        before=before,
        first_slot=int(asked.min(initial=len(index.used))),
        ops=ops,
        born=born,
        dies=np.searchsorted(ops, index.freed[born]),
        kept_until=_kept_until(index, born, needed),
        index=index,
    )


def _member_ops(index: TraceIndex, calls: tuple[int, ...]) -> Ints:
    """Forward ops of the members, without what runs between them."""
    parts = []
    for call in calls:
        start, end = int(index.start[call]), int(index.end[call])
        where = index.op_call[start:end]
        inside = (where >= call) & (where < index.call_stop[call]) & index.forward[start:end]
        parts.append(start + np.flatnonzero(inside))
    return np.concatenate(parts).astype(np.int64)


def _slots_born_inside(index: TraceIndex, calls: tuple[int, ...], member_ops: Ints) -> Ints:
    """Saved tensors of the members that a replay makes anew; all others were there before and are kept."""
    slots = np.sort(np.concatenate([index.slots_of_call(call) for call in calls]))
    storages = index.slot_storage[slots]
    fresh = ~index.resident[storages] & np.isin(index.born[storages], member_ops)
    return ints(slots[fresh])


def _first_need(index: TraceIndex, slots: Ints) -> int:
    """The first op that asks for a saved tensor whose storage is gone by then."""
    used = index.used[slots]
    gone = (used != NEVER) & (index.slot_freed[slots] <= used)
    return int(used[gone].min()) if gone.any() else NEVER


def _dropped(index: TraceIndex, slots: Ints, before: int) -> Ints:
    """Without those that are alive anyway, at the replay or when they were asked for earlier.

    Where a region calls backward itself, what it saves after that call is kept: the replay comes too early for it.
    """
    used, freed = index.used[slots], index.slot_freed[slots]
    if before == NEVER:
        return ints(slots[used == NEVER])
    return ints(slots[(freed <= before) & ((used == NEVER) | (used >= before)) & (index.position[slots] <= before)])


def _ops_to_run(index: TraceIndex, member_ops: Ints, needed: Ints, before: int) -> Ints:
    last = max(index.position[needed].max(initial=0), index.born[index.slot_storage[needed]].max(initial=-1) + 1)
    return ints(member_ops[member_ops < min(last, before)])


def _kept_until(index: TraceIndex, born: Ints, needed: Ints) -> Ints:
    by_storage = np.argsort(born)
    places = by_storage[np.searchsorted(born[by_storage], index.slot_storage[needed])]
    until = np.full(len(born), NEVER, dtype=np.int64)
    np.maximum.at(until, places, index.released[needed])
    return until


def _inputs(index: TraceIndex, calls: tuple[int, ...]) -> Ints:
    """Storages of the members' arguments, but for what an earlier member made: that is made again."""
    made: set[int] = set()
    taken: set[int] = set()
    for call in calls:
        taken.update(s for s in index.trace.calls[call].inputs if s not in made)
        made.update(index.trace.calls[call].outputs)
    return ints(sorted(taken))
