"""A trace as arrays, with the questions that simulating and solving ask of it over and over.

Calls are recorded in order of entry, so the calls inside call ``c`` are those from ``c`` up to ``call_stop[c]``: whether
an op or a saved tensor belongs to a call is one comparison of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from lowtide.plan._functions import TYPE, with_function_calls
from lowtide.plan._marks import Marks
from lowtide.plan._overhead import ENGINE, Overhead
from lowtide.records import Category, FunctionCall, Gather, Phase, StepTrace

if TYPE_CHECKING:
    from lowtide.plan._keepable import Keepable
    from lowtide.plan._replay import Replay
    from lowtide.plan._solution import KeptCall

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CATEGORIES = tuple(Category)
_PARAMETER = CATEGORIES.index(Category.PARAMETER)
CAST = "aten._to_copy.default"
"""What autocast runs on weights and arguments, among others."""
_LEAST_SHARE = 0.002
"""Of all that is saved, what a function has to free to be worth a thought."""
NEVER = -1
"""In an array of op indexes: no such op."""


def ints(values: Iterable[int]) -> Ints:
    """An array of 64-bit integers."""
    return np.fromiter(values, dtype=np.int64)


def _or_never(value: int | None) -> int:
    return NEVER if value is None else value


class TraceIndex:
    """Arrays over the ops, storages, saved tensors and calls of one trace.

    Attributes:
        overhead: what the engine takes.
        trace: with calls of functions between modules among its calls.
        replays: what has been read so far by ``_replay.replays_of``, by region, what it keeps and how much it drops.
        occurrences, keepables: the same of where a region runs, by its paths, and of what can be kept, by member call.
        among_ops, among_storages: which of some ops or storages are among others.
        seconds, workspace, op_call, forward: by op.
        bytes, category, born, freed, resident: by storage; ``category`` indexes ``CATEGORIES``.
        slot_storage, slot_call, position, used, released: by saved tensor.
        slot_freed: by saved tensor, until when it is alive without autograd.
        gather_calls: by entry of ``trace.gathers``.
        parent, call_stop, start, end, replayable: by call; a call is replayable when all calls inside it are.
    """

    def __init__(self, trace: StepTrace, overhead: Overhead = ENGINE) -> None:
        self.trace = trace = with_function_calls(trace)
        self.overhead = overhead
        self.replays: dict[tuple[tuple[str, ...], tuple[KeptCall, ...], int | None], list[Replay]] = {}
        self.occurrences: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        self.keepables: dict[int, list[Keepable]] = {}
        self._read_ops(trace)
        self._read_storages(trace)
        self._read_slots(trace)
        self._read_calls(trace)
        self._ops_of_call: dict[int, Ints] = {}
        self.among_ops, self.among_storages = Marks(self.op_count + 1), Marks(len(self.bytes))
        self.gather_calls = ints(gather.call for gather in trace.gathers)

    def _read_ops(self, trace: StepTrace) -> None:
        self.op_count = len(trace.ops)
        self.seconds: Floats = np.array([op.seconds for op in trace.ops], dtype=np.float64)
        self.workspace = ints(op.workspace_bytes for op in trace.ops)
        self.op_call = ints(_or_never(op.call) for op in trace.ops)
        self.forward: Flags = np.array([op.phase is Phase.FORWARD for op in trace.ops], dtype=np.bool_)

    def _read_storages(self, trace: StepTrace) -> None:
        place = {category: i for i, category in enumerate(CATEGORIES)}
        self.bytes = ints(s.bytes for s in trace.storages)
        self.category = ints(place[s.category] for s in trace.storages)
        self.born = ints(s.born for s in trace.storages)
        self.freed = ints(s.freed for s in trace.storages)
        self.resident: Flags = np.array([s.resident for s in trace.storages], dtype=np.bool_)

    def _read_slots(self, trace: StepTrace) -> None:
        self.slot_storage = ints(s.storage for s in trace.saved)
        self.slot_call = ints(_or_never(s.call) for s in trace.saved)
        self.position = ints(s.position for s in trace.saved)
        self.used = ints(_or_never(s.used) for s in trace.saved)
        self.released = ints(s.released for s in trace.saved)
        # Until when the engine finds the tensor itself alive: a storage that only a view keeps is made again all the same.
        shared = np.array([s.shared for s in trace.saved], dtype=np.bool_)
        self.slot_freed = np.where(shared, self.freed[self.slot_storage], 0)

    def _read_calls(self, trace: StepTrace) -> None:
        self.parent = ints(_or_never(c.parent) for c in trace.calls)
        self.start = ints(c.start for c in trace.calls)
        self.end = ints(c.end for c in trace.calls)
        self.call_stop = np.arange(1, len(trace.calls) + 1, dtype=np.int64)
        self.replayable: Flags = np.array([c.replayable for c in trace.calls], dtype=np.bool_)
        for call in range(len(trace.calls) - 1, -1, -1):
            outer = self.parent[call]
            if outer >= 0:
                self.call_stop[outer] = max(self.call_stop[outer], self.call_stop[call])
                self.replayable[outer] &= self.replayable[call]

    @cached_property
    def calls_of_path(self) -> dict[str, list[int]]:
        """Module path to its calls, in order."""
        found: dict[str, list[int]] = {}
        for i, call in enumerate(self.trace.calls):
            found.setdefault(call.path, []).append(i)
        return found

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Call to the calls made directly inside it, in order; those of the step itself are under ``NEVER``."""
        found: dict[int, list[int]] = {}
        for i, outer in enumerate(self.parent.tolist()):
            found.setdefault(outer, []).append(i)
        return found

    def following(self, call: int) -> list[int]:
        """The call that is entered next once this one has returned, the first call inside that one, and so on inwards.

        A call of a function may be passed over: then what follows that one is among them as well.
        """
        found: list[int] = []
        then = int(self.call_stop[call])
        while then < len(self.parent):
            found.append(then)
            if then + 1 < len(self.parent) and self.parent[then + 1] == then:
                then += 1
            elif self.is_function[then]:
                then = int(self.call_stop[then])
            else:
                break
        return found

    @cached_property
    def is_function(self) -> Flags:
        """By call, whether it is of a function."""
        return np.array([call.type == TYPE for call in self.trace.calls], dtype=np.bool_)

    @cached_property
    def module_calls(self) -> int:
        """How many calls are of modules."""
        return int((~self.is_function).sum())

    def written_in(self, call: int) -> set[int]:
        """What a call of a function writes to, of what was there before."""
        ops = self.trace.ops[self.start[call] : self.end[call]]
        return {storage for op in ops for storage in op.writes if self.resident[storage] or self.born[storage] < self.start[call]}

    @cached_property
    def is_offered(self) -> Flags:
        """By call, whether it may be a member of what solvers choose from: modules, and functions that are worth it.

        A function is where in one of its calls no less would be dropped with it than its inputs come to that nobody has saved.
        """
        saved = np.zeros(len(self.bytes), dtype=np.bool_)
        saved[self.slot_storage] = True
        least = _LEAST_SHARE * int(self.bytes[saved & ~self.resident].sum())

        def is_worth_it(call: int) -> bool:
            written = self.written_in(call)
            made = np.union1d(self.storages_born_in(np.arange(self.start[call], self.end[call])), ints(written))
            given = ints(s for s in self.trace.calls[call].inputs if not (self.resident[s] or saved[s] or s in written))
            return bool(self.bytes[made[saved[made]]].sum() >= max(self.bytes[given].sum(), least))

        paths = {self.trace.calls[call].path for call in np.flatnonzero(self.is_function).tolist() if is_worth_it(call)}
        return np.array([not f or c.path in paths for f, c in zip(self.is_function, self.trace.calls, strict=True)], dtype=np.bool_)

    def joins(self, run: Sequence[int], call: int) -> bool:
        """Whether a call is given something that a call of the run returned: then they can be replayed as one."""
        taken = self.trace.calls[call].inputs
        return any(storage in taken and not self._is_viewed(storage, c, call) for c in run for storage in self.trace.calls[c].outputs)

    def _is_viewed(self, storage: int, call: int, until: int) -> bool:
        """Whether a view is made of what a call returned before another one begins: the engine knows the very tensor alone.

        A view that a call in between makes and does not return is nobody else's.
        """
        for op in range(int(self.end[call]), int(self.start[until])):
            about = self.trace.ops[op]
            if storage in about.reads and storage not in about.writes and not self._makes[op]:
                around = int(self.op_call[op])
                while around != NEVER and self.start[around] >= self.end[call] and storage in self.trace.calls[around].outputs:
                    around = int(self.parent[around])
                if around == NEVER or self.start[around] < self.end[call]:
                    return True
        return False

    @cached_property
    def _makes(self) -> Flags:
        """By op, whether something is allocated for its results. What reads without is a view, whatever it is called, or has none."""
        found = np.zeros(self.op_count, dtype=np.bool_)
        found[self.born[~self.resident]] = True
        return found

    def is_leaf(self, call: int) -> bool:
        """Whether no other module is called inside."""
        return bool(self.call_stop[call] == call + 1)

    @cached_property
    def _function_ranges(self) -> tuple[list[int], list[int]]:
        """By call the first of the functions that begin in its time, and the first after those."""
        starts = ints(f.start for f in self.trace.functions)
        return np.searchsorted(starts, self.start).tolist(), np.searchsorted(starts, self.end).tolist()

    def functions_in(self, call: int) -> list[tuple[int, FunctionCall]]:
        """Calls of functions in a module call or in one inside it, in order, with their places among all."""
        lows, highs = self._function_ranges
        functions, stop = self.trace.functions, int(self.call_stop[call])
        return [(i, functions[i]) for i in range(lows[call], highs[call]) if call <= functions[i].call < stop]

    def gathers_in(self, call: int) -> tuple[Gather, ...]:
        """What is fetched before calls inside this one, in order; not what is fetched before the call itself."""
        low, high = np.searchsorted(self.gather_calls, [call + 1, self.call_stop[call]]).tolist()
        return self.trace.gathers[low:high]

    def are_apart(self, call: int, following: int) -> bool:
        """Whether parameters are fetched when the step comes from one call to the next: then the engine replays each by itself."""
        return bool(self.trace.gathers) and not self._around(following) <= self._around(call)

    def _around(self, call: int) -> set[int]:
        """The calls before which parameters are fetched, of a call and those around it."""
        found: set[int] = set()
        while call != NEVER:
            if call in self._gathered:
                found.add(call)
            call = int(self.parent[call])
        return found

    @cached_property
    def _gathered(self) -> frozenset[int]:
        return frozenset(self.gather_calls.tolist())

    @cached_property
    def function_is_own(self) -> Flags:
        """By call of a function, whether it made what it returned, and nothing has written to that since."""
        return np.array([self._makes_own(f) for f in self.trace.functions], dtype=np.bool_)

    def _makes_own(self, function: FunctionCall) -> bool:
        def is_own(storage: int) -> bool:
            return not self.resident[storage] and function.start <= self.born[storage] < function.end > self._last_write[storage]

        return bool(function.outputs) and all(map(is_own, function.outputs))

    @cached_property
    def _last_write(self) -> Ints:
        """By storage, the last op of forward that changed it in place; ``NEVER`` if none did."""
        found = np.full(len(self.born), NEVER, dtype=np.int64)
        for i in np.flatnonzero(self.forward).tolist():
            found[list(self.trace.ops[i].writes)] = i
        return found

    @cached_property
    def _writers(self) -> dict[int, list[int]]:
        """Storage to the ops of forward that change it in place."""
        found: dict[int, list[int]] = {}
        for i in np.flatnonzero(self.forward).tolist():
            for storage in self.trace.ops[i].writes:
                found.setdefault(storage, []).append(i)
        return found

    @cached_property
    def _casts(self) -> dict[int, int]:
        """Storages of weights in another type, with the ops that cast them in the course of another function: as autocast does."""
        inside = (op for f in self.trace.functions if f.end - f.start > 1 for op in range(f.start, f.end))
        made = [op for op in inside if self.trace.ops[op].name == CAST and self._reads_weights(op)]
        return {storage: op for op in made for storage in self.storages_born_in(ints((op,))).tolist()}

    def _reads_weights(self, op: int) -> bool:
        reads = list(self.trace.ops[op].reads)
        return bool(reads) and bool((self.category[reads] == _PARAMETER).all())

    def casts_found(self, ops: Ints) -> Ints:
        """The ops, of earlier calls, that had made what ``ops`` (ascending) found in autocast's cache: a replay finds it empty."""
        if not self._casts:
            return ints(())
        reads = {storage for op in ops.tolist() for storage in self.trace.ops[op].reads}
        return np.setdiff1d(ints(self._casts[storage] for storage in reads & self._casts.keys()), ops)

    def written_by(self, ops: Ints, storages: Ints) -> Ints:
        """Those of the storages that some of these ops change in place."""
        return ints(s for s in storages.tolist() if s in self._writers and self.among_ops(ints(self._writers[s]), ops).any())

    @cached_property
    def _storages_by_birth(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.born, kind="stable")
        order = order[~self.resident[order]]
        return order, self.born[order]

    @cached_property
    def _slots_by_call(self) -> tuple[Ints, list[int], list[int]]:
        """Saved tensors in the order of calls, and by call the first that was saved in it and the first after those."""
        order = np.argsort(self.slot_call, kind="stable")
        calls = self.slot_call[order]
        return order, np.searchsorted(calls, np.arange(len(self.parent))).tolist(), np.searchsorted(calls, self.call_stop).tolist()

    def slots_of_call(self, call: int) -> Ints:
        """Tensors that were saved in a call or in a call inside it."""
        order, lows, highs = self._slots_by_call
        return order[lows[call] : highs[call]]

    def ops_of_call(self, call: int) -> Ints:
        """Ops of forward in a call and in those inside it, ascending."""
        found = self._ops_of_call.get(call)
        if found is None:
            start, end = int(self.start[call]), int(self.end[call])
            where = self.op_call[start:end]
            inside = (where >= call) & (where < self.call_stop[call]) & self.forward[start:end]
            found = self._ops_of_call[call] = start + np.flatnonzero(inside)
        return found

    def storages_born_in(self, ops: Ints) -> Ints:
        """Storages that one of these ops (ascending) allocated, in order of birth."""
        order, born = self._storages_by_birth
        low, high = born.searchsorted((ops[0], ops[-1] + 1)) if len(ops) else (0, 0)
        return order[low:high][self.among_ops(born[low:high], ops)]
