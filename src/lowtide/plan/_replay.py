"""What replaying a region does to a step: what it drops, what it holds, what runs again and when.

This is the reading of the engine's semantics that executor and solvers share; how the bytes add up over time is worked out
by each of them on its own. All of it depends on one region and those inside it, never on what else a plan replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._index import CATEGORIES, NEVER, Flags, Ints, TraceIndex, ints
from lowtide.plan._keepable import Keepable, kept_in, skipped_ops
from lowtide.plan._saved import Saved
from lowtide.plan._solution import KeptCall
from lowtide.records import Gather


@dataclass(frozen=True)
class Replay:
    """One occurrence of a region in the step, with its replay.

    Attributes:
        region: paths of the region.
        kept: the calls whose results are kept.
        calls: its member calls, in order.
        dropped: saved tensors that are not kept; the original's storage is no longer held for them.
        held, held_until: storages of the region's inputs, and of results that it keeps, with the op before which it lets go of each.
        results: storages of results that it keeps, as far as the replay wants them.
        before: the replay runs in the gap before this op; ``NEVER`` if nothing is replayed.
        first_slot: of the saved tensors asked for there, the first; orders replays in one gap.
        ops: ops that run again, in order.
        born: storages that these ops allocate anew, and copies of inputs that they write to, of which a replay is given another.
        dies: for each of ``born``, the place in ``ops`` before which it is gone; ``len(ops)`` if it lives to the end.
        kept_until: for each of ``born``, the op of the step before which backward has let go of it; ``NEVER`` if
            no saved tensor needs it.
        gathers: the parameters that it fetches from other processes.
    """

    region: tuple[str, ...]
    kept: tuple[KeptCall, ...]
    calls: tuple[int, ...]
    dropped: Ints
    held: Ints
    held_until: Ints
    results: Ints
    before: int
    first_slot: int
    ops: Ints
    born: Ints
    dies: Ints
    kept_until: Ints
    gathers: tuple[Gather, ...]
    index: TraceIndex

    @cached_property
    def seconds(self) -> float:
        """Time of the ops that run again."""
        return float(self.index.seconds[self.ops].sum())

    @cached_property
    def gather_s(self) -> float:
        """Time to fetch what a step without the replay fetches less often."""
        return sum((gather.seconds for gather in self.gathers if gather.is_extra), start=0.0)

    @cached_property
    def overhead_s(self) -> float:
        """What the engine takes for it."""
        return self.index.overhead.of(self)

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


def replays_of(index: TraceIndex, paths: tuple[str, ...], kept: tuple[KeptCall, ...] = (), first_saved: int | None = None) -> list[Replay]:
    """Every occurrence of a region in the step; the arguments are as of ``PlannedRegion``.

    Raises:
        PlanError: a path that was never called, members that never run one after the other, a call that
            cannot be replayed, or one that is to be kept and is not there.
    """
    key = (paths, kept, first_saved)
    if key not in index.replays:
        index.replays[key] = _read_all(index, paths, kept, first_saved)
    return index.replays[key]


def _read_all(index: TraceIndex, paths: tuple[str, ...], kept: tuple[KeptCall, ...], first_saved: int | None) -> list[Replay]:
    return [read(index, paths, calls, kept, first_saved=first_saved) for calls in replayable(index, paths)]


def replayable(index: TraceIndex, paths: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The occurrences, all of which may be replayed.

    Raises:
        PlanError: as of ``replays_of``.
    """
    if paths not in index.occurrences:
        index.occurrences[paths] = _replayable(index, paths)
    return index.occurrences[paths]


def _replayable(index: TraceIndex, paths: tuple[str, ...]) -> list[tuple[int, ...]]:
    found = occurrences(index, paths)
    for call in (c for calls in found for c in calls if not index.replayable[c]):
        path = index.trace.calls[call].path
        raise PlanError(f"region {name_of(paths)} cannot be replayed: the call of {path!r} may not run twice; leave it out of the plan")
    return found


def occurrences(index: TraceIndex, paths: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Groups of calls that are replayed as one: runs of the paths one right after the other, and member calls outside of any run."""
    for path in paths:
        if path not in index.calls_of_path:
            raise PlanError(
                f"the plan has a region {path!r}, but the traced step calls no such module: make a plan from a trace of this step"
            )
    found = [run for first in index.calls_of_path[paths[0]] if (run := _run_from(index, first, paths)) is not None]
    if not found:
        raise PlanError(f"region {name_of(paths)}: these modules never run one after the other, each on what one before it made")
    in_run = {c for run in found for c in run}
    alone: list[tuple[int, ...]] = [(c,) for path in paths for c in index.calls_of_path[path] if c not in in_run]
    return _outermost(index, sorted([part for run in found for part in _parts(index, run)] + alone))


def _parts(index: TraceIndex, run: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A run, cut where parameters are fetched on the way."""
    cuts = [i for i in range(1, len(run)) if index.are_apart(run[i - 1], run[i])]
    return [run[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(run)], strict=True)]


def _run_from(index: TraceIndex, first: int, paths: tuple[str, ...]) -> tuple[int, ...] | None:
    """The calls of all paths, one right after the other, from this one on."""
    run = [first]
    for path in paths[1:]:
        following = next((c for c in index.following(run[-1]) if index.trace.calls[c].path == path), None)
        if following is None or not index.joins(run, following):
            return None
        run.append(following)
    return tuple(run)


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


def read(
    index: TraceIndex,
    paths: tuple[str, ...],
    calls: tuple[int, ...],
    kept: tuple[KeptCall, ...],
    inside: Sequence[Replay] = (),
    around: Ints | None = None,
    first_saved: int | None = None,
) -> Replay:
    """One occurrence.

    Args:
        index: of the trace.
        paths, calls, kept: of the region.
        inside: replays of regions in it: what is saved there is theirs, and their inputs are handed to this one.
        around: ops of the outermost region around it, if there is one: what they make is gone until that one is replayed.
        first_saved: how many of the tensors saved in it are dropped.
    """
    keeps = kept_in(index, calls, kept)
    member_ops = _ops_to_run(index, calls, keeps)
    inputs = _inputs(index, calls)
    written = index.written_by(member_ops, inputs)
    makers = member_ops if around is None else around
    own = Saved.by_autograd(index, _slots_made_anew(index, calls, makers, written, inside, first_saved))
    saved = own.with_(Saved.by_regions(index, inside, makers)) if inside else own
    before = _first_need(saved)
    drops = _drops(saved, before)
    dropped, stays = saved.at(drops), saved.at(~drops & saved.handed)
    needed = dropped.at((dropped.used != NEVER) & (before != NEVER))
    last = _last_needed(index, needed, before)
    ops = member_ops[member_ops < last]
    made = np.concatenate([index.storages_born_in(ops), index.written_by(ops, written)])
    gathers = _gathers(index, calls, before, last)
    whole, whole_until = _whole(gathers)
    born = np.concatenate([made, whole])
    inputs = inputs if len(dropped.number) or inside else ints(())
    results = ints(s for k in keeps if k.start < last for s in k.outputs)
    until = max([int(dropped.released.max(initial=0)), *(int(r.held_until.max(initial=0)) for r in inside)])
    return Replay(
        region=paths,
        kept=kept,
        calls=calls,
        dropped=dropped.number[~dropped.handed],
        held=np.concatenate([inputs, results, stays.storage]),
        # Results are handed back in the replay: at its end, whatever has not been saved again is gone.
        held_until=np.concatenate([np.repeat(ints((until, before + 1)), (len(inputs), len(results))), stays.released]),
        results=results,
        before=before,
        first_slot=int(needed.number[needed.used == before].min(initial=len(index.used))),
        ops=ops,
        born=born,
        dies=np.searchsorted(ops, index.freed[born]),
        kept_until=np.concatenate([_kept_until(index, made, needed), whole_until]),
        gathers=gathers,
        index=index,
    )


def _ops_to_run(index: TraceIndex, calls: tuple[int, ...], keeps: Sequence[Keepable]) -> Ints:
    """Forward ops of the members without what is kept, with what autocast's cache had for them, ascending."""
    ops = member_ops_of(index, calls)
    if keeps:
        ops = ops[~index.among_ops(ops, skipped_ops(index, keeps))]
    casts = index.casts_found(ops)
    return np.union1d(casts, ops) if len(casts) else ops


def member_ops_of(index: TraceIndex, calls: tuple[int, ...]) -> Ints:
    """Forward ops of the members, without what runs between them."""
    return np.concatenate([index.ops_of_call(call) for call in calls])


def slots_of(index: TraceIndex, calls: tuple[int, ...], first_saved: int | None = None) -> Ints:
    """The tensors saved in the members, in the order in which they are saved: all, or the first so many."""
    slots = np.sort(np.concatenate([index.slots_of_call(call) for call in calls]))
    return slots if first_saved is None else slots[:first_saved]


def _slots_made_anew(
    index: TraceIndex, calls: tuple[int, ...], makers: Ints, written: Ints, inside: Sequence[Replay], first_saved: int | None
) -> Ints:
    """Saved tensors of the members that replays make anew, or by writing to an input; all others were there before and are kept."""
    slots = slots_of(index, calls, first_saved)
    if inside:
        theirs = np.concatenate([index.slots_of_call(call) for replay in inside for call in replay.calls])
        slots = np.setdiff1d(slots, theirs, assume_unique=True)
    storages = index.slot_storage[slots]
    fresh = ~index.resident[storages] & index.among_ops(index.born[storages], makers)
    return ints(slots[fresh | np.isin(storages, written)] if len(written) else slots[fresh])


def _first_need(saved: Saved) -> int:
    """The first op that asks for something whose storage is gone by then."""
    gone = (saved.used != NEVER) & (saved.freed <= saved.used)
    return int(saved.used[gone].min()) if gone.any() else NEVER


def _drops(saved: Saved, before: int) -> Flags:
    """Without those that are alive anyway, at the replay or when they were asked for earlier.

    Where a region calls backward itself, what it saves after that call is kept: the replay comes too early for it.
    """
    never: Flags = saved.used == NEVER
    if before == NEVER:
        return never
    drops: Flags = (saved.freed <= before) & (never | (saved.used >= before)) & (saved.position <= before)
    return drops


def _last_needed(index: TraceIndex, needed: Saved, before: int) -> int:
    """The op at which a replay may end: whatever backward needs has been made and saved by then."""
    made = index.born[needed.storage].max(initial=-1) + 1
    return min(int(max(needed.position.max(initial=0), made)), before)


def _kept_until(index: TraceIndex, born: Ints, needed: Saved) -> Ints:
    needed = needed.at(index.among_storages(needed.storage, born))  # a region around makes the others
    by_storage = np.argsort(born)
    places = by_storage[np.searchsorted(born[by_storage], needed.storage)]
    until = np.full(len(born), NEVER, dtype=np.int64)
    np.maximum.at(until, places, needed.released)
    return until


def _gathers(index: TraceIndex, calls: tuple[int, ...], before: int, last: int) -> tuple[Gather, ...]:
    """What a replay up to an op fetches: what is in front of a member is fetched outside of the region."""
    inside = (gather for call in calls for gather in index.gathers_in(call)) if index.trace.gathers else ()
    return tuple(g for g in inside if index.start[g.call] < last and not g.is_whole(before)) if before != NEVER else ()


def _whole(gathers: tuple[Gather, ...]) -> tuple[Ints, Ints]:
    """Storages of what is fetched, and the op before which each gives way to what backward has of it."""
    lives = [(storage, g.whole_from) for g in gathers for storage in g.storages]
    return ints(storage for storage, _ in lives), ints(until for _, until in lives)


def _inputs(index: TraceIndex, calls: tuple[int, ...]) -> Ints:
    """Storages of the members' arguments and of attributes that they replace, but for what an earlier member made: that is made again."""
    made: set[int] = set()
    taken: set[int] = set()
    for call in map(index.trace.calls.__getitem__, calls):
        taken.update(s for s in (*call.inputs, *call.replaced) if s not in made)
        made.update(call.outputs)
    return ints(sorted(taken))
