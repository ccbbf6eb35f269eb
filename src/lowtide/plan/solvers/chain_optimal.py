"""The fastest persistent schedule of a chain of unlike stages (Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal
checkpointing for heterogeneous chains: how to train deep neural networks with limited memory").

Persistent: what is held stays held until backward is through with it. Over pairs (stages s to t, memory m) the least time is that of
leaving s as it is, with all that autograd saves in it held, and the best of s + 1 to t in what is left; or of going forward to some k with
nothing held but the input of k, the best of k to t in what that leaves, and then the best of s to k - 1 in m. The stages before k are one
region then, and inside it the same holds again.

Complexity: O(n**3 m) for n stages and m units of memory, with O(n**2 m) numbers held. Chains of more than 100 stages are taken in
groups of neighbours, and memory in 200 to 1000 units, rounded up. Schedules are made for memory of every amount, and the simulator
says which are within the budget. Known shortcomings: a stage is left as it is or replayed whole; what is alive outside the chain is
known to the simulator alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from lowtide.plan._index import NEVER, Floats, Ints, TraceIndex, ints
from lowtide.plan._replay import member_ops_of
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._chain import Chain, Run, Schedule, bytes_of, chain_of

NAME = "chain-optimal"
_MOST_STAGES = 100
_UNITS_OF_FEW, _FEW, _UNITS = 1000, 30, 200
_MOST_TRIED = 40


@dataclass(frozen=True)
class Stages:
    """What each stage takes, in order; of memory, all in the same unit.

    Attributes:
        seconds: of its forward.
        given: of its input.
        kept: of its input, as far as autograd saves it there.
        saved: of what autograd saves in it, its input and its result left out.
        forward: the most that is alive while it goes forward with nothing saved, its input left out.
        saving: the same when it is left as it is.
        backward: the most that is alive in its backward, its input left out.
        gradient: what is alive by nature when its backward comes: while stages before it are replayed up to it, that is there as well.
    """

    seconds: Floats
    given: Ints
    kept: Ints
    saved: Ints
    forward: Ints
    saving: Ints
    backward: Ints
    gradient: Ints

    def without_gradients(self) -> Stages:
        """The same where stages before it find none when they are replayed."""
        return replace(self, gradient=np.zeros_like(self.given))

    def without_peaks(self) -> Stages:
        """The same where only what is held counts: where peaks coincide is not as exact here as in the simulator, which chooses."""
        none = np.zeros_like(self.given)
        return replace(self, forward=none, saving=none, backward=none, gradient=none)

    @property
    def memory(self) -> tuple[Ints, ...]:
        """All columns but that of time."""
        return self.given, self.kept, self.saved, self.forward, self.saving, self.backward, self.gradient

    def in_units(self, most: int) -> Stages:
        """Bytes in units: of those that divide all of them if they are so few in the whole, else in as many, rounded up."""
        whole = _whole(self)
        common = int(np.gcd.reduce(np.concatenate(self.memory)))
        unit = max(common if whole <= most * common else -(-whole // most), 1)
        return Stages(self.seconds, *(-(-column // unit) for column in self.memory))


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each amount of memory that makes a difference; of very many, some.

    Raises:
        InvalidInputError: the step is no chain.
    """
    chain = chain_of(index, NAME)
    groups = chain.grouped(_MOST_STAGES)
    stages = stages_of(index, chain, groups)
    units = _UNITS_OF_FEW if len(groups) <= _FEW else _UNITS
    variants = (stages, stages.without_gradients(), stages.without_peaks())
    found = (_schedules(Table(variant.in_units(units)), len(groups)) for variant in variants)
    chosen = dict.fromkeys(schedule for schedules in found for schedule in schedules)
    return [chain.regions(_in_stages(schedule, groups)) for schedule in chosen]


def _schedules(table: Table, stages: int) -> list[Schedule]:
    """Those that differ; of long chains, whose plans take long to simulate, some."""
    found = list(dict.fromkeys(table.schedule(m) for m in table.feasible()))
    return found if stages <= _FEW else found[:: 1 + len(found) // _MOST_TRIED]


def stages_of(index: TraceIndex, chain: Chain, groups: list[range]) -> Stages:
    """Read from the trace what groups of neighbouring stages take, in bytes."""
    natural = _natural(index)
    rows = [_of_group(index, [chain.calls[i] for i in group], natural) for group in groups]
    seconds, *columns = zip(*rows, strict=True)
    return Stages(np.array(seconds, dtype=np.float64), *map(ints, columns))


def _of_group(index: TraceIndex, calls: list[int], natural: Ints) -> tuple[float, ...]:
    ops = np.unique(np.concatenate([member_ops_of(index, (call,)) for call in calls]))
    given, results = ints(index.trace.calls[calls[0]].inputs), ints(index.trace.calls[calls[-1]].outputs)
    size = bytes_of(index, given)
    slots = np.concatenate([index.slots_of_call(call) for call in calls])
    kept = bytes_of(index, np.intersect1d(index.slot_storage[slots], given))
    used = index.used[slots][index.used[slots] != NEVER]
    back = np.arange(used.min(initial=index.op_count), index.released[slots].max(initial=0))
    slots = slots[~np.isin(index.slot_storage[slots], given) & ~index.resident[index.slot_storage[slots]]]
    saved = np.setdiff1d(index.slot_storage[slots], results)
    forward = natural[ops] - size
    saving = forward + _gone(index, saved, np.full(len(saved), index.op_count), ops)
    backward = natural[back] + _gone(index, *_until(index, slots), back)
    most = (int(column.max(initial=0)) for column in (forward, saving, backward))
    gradient = int(natural[back[0] - 1 : back[0]].sum()) if len(back) else 0
    return float(index.seconds[ops].sum()), size, kept, bytes_of(index, saved), *most, gradient


def _until(index: TraceIndex, slots: Ints) -> tuple[Ints, Ints]:
    """The storages of saved tensors, and when autograd lets go of each."""
    storages, which = np.unique(index.slot_storage[slots], return_inverse=True)
    until = np.zeros(len(storages), dtype=np.int64)
    np.maximum.at(until, which, index.released[slots])
    return storages, until


def _gone(index: TraceIndex, storages: Ints, until: Ints, ops: Ints) -> Ints:
    """Bytes during some ops of storages that are naturally gone by then and not yet let go of."""
    change = np.zeros(index.op_count + 1, dtype=np.int64)
    begin = index.freed[storages]
    np.add.at(change, np.minimum(begin, until), index.bytes[storages])
    np.subtract.at(change, until, index.bytes[storages])
    found: Ints = change.cumsum()[ops]
    return found


def _natural(index: TraceIndex) -> Ints:
    """Bytes alive by nature during each op, without what was there before the step."""
    new = ~index.resident
    change = np.zeros(index.op_count + 1, dtype=np.int64)
    np.add.at(change, index.born[new], index.bytes[new])
    np.subtract.at(change, np.maximum(index.freed[new], index.born[new]), index.bytes[new])
    alive: Ints = change.cumsum()[:-1] + index.workspace
    return alive


def _whole(stages: Stages) -> int:
    """Memory in which nothing need be replayed."""
    return int((stages.saved + stages.given).sum() + (stages.saving + stages.backward + stages.gradient).max())


class Table:
    """The least time of stages ``s`` to ``t`` in memory ``m``, for all of them.

    The input of s is either held by a region around, or the first stage has to see to it: as much as autograd saves of it where that is
    left, all of it where a run begins.

    Args:
        stages: with memory in units.
    """

    def __init__(self, stages: Stages) -> None:
        self._stages, self._n = stages, len(stages.seconds)
        self._memory = np.arange(_whole(stages) + 1)
        shape = (2, self._n, self._n, len(self._memory))
        self._time = np.full(shape, np.inf)
        """By whether the input of s counts."""
        self._choice = np.full(shape, NEVER, dtype=np.int16)
        """After how many stages to hold an input; 0 to leave the first as it is."""
        for length in range(1, self._n + 1):
            for start in range(self._n - length + 1):
                self._fill(start, start + length - 1)

    def _fill(self, start: int, stop: int) -> None:
        runs, ks = self._of_runs(start, stop)
        for counts in (0, 1):
            left = self._left(start, stop, counts)
            with_runs = _in_less(runs, int(self._stages.given[start]) * counts)
            self._time[counts, start, stop] = np.minimum(left, with_runs)
            picked = np.where(left <= with_runs, 0, _in_less(ks, int(self._stages.given[start]) * counts))
            self._choice[counts, start, stop] = np.where(np.isfinite(self._time[counts, start, stop]), picked, NEVER)

    def _of_runs(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """The least time where the first stages are a run, and how many they are, in memory beside the input."""
        if stop == start:
            nothing = np.full(len(self._memory), np.inf)
            return nothing, nothing
        stages, ks = self._stages, np.arange(1, stop - start + 1)
        forward = np.cumsum(stages.seconds[start:stop])[:, None]
        options = forward + self._time[1, start + ks, stop] + self._time[0, start, start + ks - 1]
        # The input of the first is held already; those of the others are there while they run.
        inside = np.concatenate([[0], stages.given[start + 1 : stop]])
        needed = np.maximum.accumulate(stages.forward[start:stop] + inside) + self._gradient(stop)
        options[self._memory < needed[:, None]] = np.inf
        best = options.argmin(axis=0)
        return options[best, self._memory], ks[best].astype(np.float64)

    def _left(self, start: int, stop: int, counts: int) -> Floats:
        """The least time where the first stage is left as it is."""
        stages = self._stages
        kept, given = int(stages.kept[start]) * counts, int(stages.given[start]) * counts
        following = self._time[1, start + 1, stop] if stop > start else np.zeros(len(self._memory))
        found = stages.seconds[start] + _in_less(following, kept + int(stages.saved[start]))
        needed = max(given + int(stages.saving[start]) + self._gradient(stop), kept + int(stages.backward[start]))
        return np.where(self._memory < needed, np.inf, found)

    def _gradient(self, stop: int) -> int:
        """What is there from later stages: only the first forward of all has none."""
        return int(self._stages.gradient[stop]) if stop < self._n - 1 else 0

    def feasible(self) -> list[int]:
        """Amounts of memory, beside the chain's input, in which the whole chain fits, least first."""
        return [int(m) for m in np.flatnonzero(np.isfinite(self._time[0, 0, -1]))]

    def seconds(self, memory: int) -> float:
        """The least time of all forward runs in so much memory; infinite where it does not fit."""
        return float(self._time[0, 0, -1, memory])

    def schedule(self, memory: int) -> Schedule:
        """What is replayed, for that time."""
        return self._schedule(0, self._n - 1, memory)

    def _schedule(self, start: int, stop: int, memory: int) -> Schedule:
        found: list[Run] = []
        counts = 0
        while start <= stop:
            k = int(self._choice[counts, start, stop, memory])
            memory -= counts * int((self._stages.given if k else self._stages.kept)[start])
            if k:
                found.append(Run(start, start + k, self._schedule(start, start + k - 1, memory)))
            else:
                memory -= int(self._stages.saved[start])
            start, counts = start + (k or 1), 1
        return tuple(found)


def _in_less(time: Floats, less: int) -> Floats:
    """Times where so much of the memory is taken."""
    return np.concatenate([np.full(min(less, len(time)), np.inf), time[: max(len(time) - less, 0)]])


def _in_stages(schedule: Schedule, groups: list[range]) -> Schedule:
    """A schedule of groups as one of their members."""
    return tuple(Run(groups[r.start].start, groups[r.stop - 1].stop, _in_stages(r.inside, groups)) for r in schedule)
