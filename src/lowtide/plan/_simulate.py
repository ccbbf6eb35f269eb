"""Run a plan over a trace, without a device: the timeline of live bytes, and the added time.

This is the one executor that judges every solver, and that measured steps judge in turn. It plays the ops of the
traced step in order, with each region's replay in the gap before the op that first asks for something dropped:

* A storage lives from its birth until it is naturally gone, and as long as something holds it: a saved tensor that
  is kept, or a region that has it among its inputs.
* A replay allocates again what its ops allocated. What backward still wants of it lives until autograd lets go;
  the rest as long as it naturally does, at most to the end of the replay.
* What calls made that are kept is held until the replay is over, which does not run them.
* A region inside another hands its inputs to that one, whose replay makes them again and ends where the last of them is back.
* The workspace of an op is alive while it runs.

Lifetimes are added up as differences at their ends and summed once, so a step of n ops costs O(n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._index import CATEGORIES, NEVER, Floats, Ints, TraceIndex
from lowtide.plan._replay import Replay, name_of
from lowtide.plan._solution import Plan, PlannedRegion
from lowtide.plan._trees import refuse_overlap, trees_of
from lowtide.records import Category, Decision, StepTrace

_TEMPORARY = CATEGORIES.index(Category.TEMPORARY)
_REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Moment:
    """One op while it runs, in the step as planned.

    Attributes:
        op: index into ``trace.ops``.
        phase: ``"forward"``, ``"replay"``, ``"backward"`` or ``"optimizer"``.
        region: paths of the region that is replayed; empty otherwise.
        start_s, seconds: when it starts, counted from the start of the step, and how long it runs.
        live_bytes: bytes alive meanwhile, in the order of ``list(Category)``.
    """

    op: int
    phase: str
    region: tuple[str, ...]
    start_s: float
    seconds: float
    live_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """The moments of a step as arrays.

    Attributes:
        op: ``(n,)`` index into ``trace.ops``.
        replay: ``(n,)`` index into ``regions`` of what is replayed; ``NEVER`` in the step itself.
        seconds: ``(n,)``.
        live_bytes: ``(n, len(CATEGORIES))``.
        regions: paths of each replay.
    """

    trace: StepTrace
    op: Ints
    replay: Ints
    seconds: Floats
    live_bytes: Ints
    regions: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Simulation:
    """What a plan does to a step.

    Attributes:
        peak_bytes: most bytes alive at once.
        peak_moment: the first of ``moments`` at which they are.
        step_s: time of all ops, replayed ones included, without ``overhead_s`` and ``gather_s``.
        replay_s: time of the replayed ops.
        overhead_s: what the engine takes beside them.
        gather_s: what fetching parameters for replays takes, where the step without them fetches less often.
        gathers: how often that happens.
        timeline: the moments as arrays.
    """

    peak_bytes: int
    peak_moment: int
    step_s: float
    replay_s: float
    overhead_s: float
    gather_s: float
    gathers: int
    timeline: Timeline = field(repr=False, compare=False)

    @property
    def planned_s(self) -> float:
        """How long the step takes, with what the engine takes and what is fetched for replays."""
        return self.step_s + self.overhead_s + self.gather_s

    @property
    def added_s(self) -> float:
        """How much longer the step takes than without the plan."""
        return self.replay_s + self.overhead_s + self.gather_s

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Every op of the step in the order they run, replays included."""
        t = self.timeline
        starts = np.concatenate([[0.0], np.cumsum(t.seconds)[:-1]]) if len(t.op) else t.seconds
        phases = [op.phase.value for op in t.trace.ops]
        names = [_REPLAY if replay != NEVER else phases[op] for op, replay in zip(t.op.tolist(), t.replay.tolist(), strict=True)]
        regions = [() if replay == NEVER else t.regions[replay] for replay in t.replay.tolist()]
        live = map(tuple, t.live_bytes.tolist())
        return tuple(map(Moment, t.op.tolist(), names, regions, starts.tolist(), t.seconds.tolist(), live))


def simulate(trace: StepTrace, plan: Plan | Sequence[PlannedRegion] | None) -> Simulation:
    """Run a plan over a trace.

    Args:
        trace: of the un-checkpointed step.
        plan: a plan, its regions alone, or ``None`` for the step as traced.

    Raises:
        PlanError: the plan is for another model, names a module that the step never calls, has overlapping regions,
            or decides what the executor cannot carry out.
    """
    if isinstance(plan, Plan):
        plan.check_fingerprint(trace.fingerprint)
    regions = plan.regions if isinstance(plan, Plan) else tuple(plan or ())
    return run(TraceIndex(trace), regions)


def run(index: TraceIndex, regions: Sequence[PlannedRegion]) -> Simulation:
    """``simulate`` for callers that ask again and again about one trace."""
    trees = [tree for region in regions if _is_replayed(region) for tree in trees_of(index, region)]
    refuse_overlap(index, [tree[0] for tree in trees])
    replays = [replay for tree in trees for replay in tree]
    # Where one inside another is due with it, the one around comes first: the sort leaves it there.
    ran = sorted((r for r in replays if r.before != NEVER), key=lambda r: (r.before, r.first_slot))
    timeline = _merge(index, _live_in_step(index, replays), _live_in_replays(index, replays, ran), ran)
    total = timeline.live_bytes.sum(axis=1)
    replay_s = sum((r.seconds for r in ran), start=0.0)
    overhead_s = sum((r.overhead_s for r in replays), start=0.0)
    extra = [gather.seconds for r in ran for gather in r.gathers if gather.is_extra]
    peak = int(total.argmax()) if len(total) else 0
    most, step_s = int(total.max(initial=0)), float(index.seconds.sum()) + replay_s
    return Simulation(most, peak, step_s, replay_s, overhead_s, sum(extra, start=0.0), len(extra), timeline)


def _is_replayed(region: PlannedRegion) -> bool:
    if region.decision not in (Decision.KEEP, Decision.RECOMPUTE):
        raise PlanError(f"region {name_of(region.paths)} is to be {region.decision.value}: only keep and recompute can be simulated")
    return region.decision is Decision.RECOMPUTE


def _freed_as_held(index: TraceIndex, replays: Sequence[Replay]) -> Ints:
    """For each storage the op before which it is gone, with all that holds it."""
    freed = index.freed.copy()
    kept = np.ones(len(index.slot_storage), dtype=np.bool_)
    for replay in replays:
        kept[replay.dropped] = False
        np.maximum.at(freed, replay.held, replay.held_until)
    np.maximum.at(freed, index.slot_storage[kept], index.released[kept])
    return freed


def _copies(replay: Replay) -> tuple[Ints, Ints]:
    """Storages that backward wants of a replay, and the op before which each is let go of."""
    kept = replay.kept_until > replay.before
    return replay.born[kept], replay.kept_until[kept]


def _sum_lives(index: TraceIndex, lives: Sequence[tuple[Ints, Ints, Ints]]) -> Ints:
    """Bytes alive at each place, ``(op_count + 1, categories)``, of lives ``(storages, from, until)``."""
    change = np.zeros((index.op_count + 2, len(CATEGORIES)), dtype=np.int64)
    for storages, begin, until in lives:
        category, size = index.category[storages], index.bytes[storages]
        np.add.at(change, (np.minimum(begin, index.op_count + 1), category), size)
        np.subtract.at(change, (np.clip(until, begin, index.op_count + 1), category), size)
    return change.cumsum(axis=0)[:-1]


def _live_in_step(index: TraceIndex, replays: Sequence[Replay]) -> Ints:
    """Bytes alive during each op of the step itself: ``born <= op < freed``."""
    everything = np.arange(len(index.born), dtype=np.int64)
    lives = [(everything, index.born, _freed_as_held(index, replays))]
    for replay in replays:
        storages, until = _copies(replay)
        lives.append((storages, np.full(len(storages), replay.before), until))
    live = _sum_lives(index, lives)[:-1]
    live[:, _TEMPORARY] += index.workspace
    return live


def _live_in_replays(index: TraceIndex, replays: Sequence[Replay], ran: Sequence[Replay]) -> list[Ints]:
    """Bytes alive during each op of each replay: its own, over ``born < before < freed`` of all else."""
    everything = np.arange(len(index.born), dtype=np.int64)
    # A life that spans the gap before op g is one that began before g: in the gaps it begins one later.
    lives = [(everything, np.where(index.resident, 0, index.born + 1), _freed_as_held(index, replays))]
    for replay in ran:
        storages, until = _copies(replay)
        lives.append((storages, np.full(len(storages), replay.before + 1), until))
    gaps = _sum_lives(index, lives)
    found: list[Ints] = []
    earlier = np.zeros(len(CATEGORIES), dtype=np.int64)
    for i, replay in enumerate(ran):
        if i and ran[i - 1].before != replay.before:
            earlier = np.zeros_like(earlier)
        live = replay.live_bytes + gaps[replay.before] + earlier
        live[:, _TEMPORARY] += index.workspace[replay.ops]
        found.append(live)
        earlier = earlier + _bytes_by_category(index, _copies(replay)[0])
    return found


def _bytes_by_category(index: TraceIndex, storages: Ints) -> Ints:
    found = np.zeros(len(CATEGORIES), dtype=np.int64)
    np.add.at(found, index.category[storages], index.bytes[storages])
    return found


def _merge(index: TraceIndex, in_step: Ints, in_replays: Sequence[Ints], ran: Sequence[Replay]) -> Timeline:
    """The moments in the order they happen."""
    ops = [np.arange(index.op_count, dtype=np.int64), *(r.ops for r in ran)]
    turn = np.concatenate([2 * ops[0] + 1, *(np.full(len(r.ops), 2 * r.before) for r in ran)])
    replay = np.concatenate([np.full(index.op_count, NEVER), *(np.full(len(r.ops), i) for i, r in enumerate(ran))])
    order = np.argsort(turn, kind="stable")
    op = np.concatenate(ops)[order]
    live = np.concatenate([in_step, *in_replays])[order]
    return Timeline(index.trace, op, replay[order].astype(np.int64), index.seconds[op], live, tuple(r.region for r in ran))
