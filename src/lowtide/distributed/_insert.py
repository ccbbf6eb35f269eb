"""A trace with ops put in between those that it has: what an engine does around the modules of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.records import Call, FunctionCall, Op, Phase, SavedTensor, StepTrace, Storage


@dataclass(frozen=True, slots=True)
class Inserted:
    """An op to put in. It belongs to no call, so no replay runs it.

    Attributes:
        name: as it is shown.
        phase: of the step.
        collective: it communicates with other processes.
        at: the op of the trace right before which it runs; their number, for the end.
        call: it runs right before this call is entered, if it does.
    """

    name: str
    phase: Phase
    collective: bool
    at: int
    call: int | None = None


class Longer:
    """A trace with more ops, and where everything went.

    Attributes:
        trace: as it is now.
        places: the index of each inserted op.
    """

    def __init__(self, trace: StepTrace, inserted: Sequence[Inserted]) -> None:
        """Put them in; of those at one place the first comes first."""
        order = sorted(range(len(inserted)), key=lambda i: inserted[i].at)
        self._sorted = [inserted[i] for i in order]
        self._at = np.array([each.at for each in self._sorted], dtype=np.int64)
        self._old, self._count = len(trace.ops), len(trace.ops) + len(inserted)
        places = {i: inserted[i].at + turn for turn, i in enumerate(order)}
        self.places = [places[i] for i in range(len(inserted))]
        self.trace = self._longer(trace)

    def op(self, index: int) -> int:
        """Where an op went."""
        return index + int(np.searchsorted(self._at, index, side="right"))

    def until(self, moment: int) -> int:
        """What was over right after the op before is over right after it again, and what outlived the step does."""
        if moment == self._old:
            return self._count
        return self.op(moment - 1) + 1 if moment else 0

    def _longer(self, trace: StepTrace) -> StepTrace:
        return replace(
            trace,
            ops=self._ops(trace),
            storages=tuple(map(self._storage, trace.storages)),
            saved=tuple(map(self._saved, trace.saved)),
            calls=tuple(self._call(index, call) for index, call in enumerate(trace.calls)),
            functions=tuple(map(self._function, trace.functions)),
        )

    def _ops(self, trace: StepTrace) -> tuple[Op, ...]:
        found = [replace(op, origin=None if op.origin is None else self.op(op.origin)) for op in trace.ops]
        for each in reversed(self._sorted):
            found.insert(each.at, Op(each.name, each.phase, None, "", 0.0, 0, False, (), (), collective=each.collective))
        return tuple(found)

    def _storage(self, storage: Storage) -> Storage:
        return replace(storage, born=0 if storage.resident else self.op(storage.born), freed=self.until(storage.freed))

    def _saved(self, slot: SavedTensor) -> SavedTensor:
        used = None if slot.used is None else self.op(slot.used)
        return replace(slot, position=self.until(slot.position), used=used, released=self.until(slot.released))

    def _call(self, index: int, call: Call) -> Call:
        start, end = self._span(call.start, call.end, index)
        return replace(call, start=start, end=end)

    def _function(self, function: FunctionCall) -> FunctionCall:
        start, end = self._span(function.start, function.end, function.call)
        return replace(function, start=start, end=end)

    def _span(self, start: int, end: int, call: int) -> tuple[int, int]:
        """Of what begins with a call, or in it: an op that runs before that call, or before one around it, runs before this too."""
        begin = self.until(start) + sum(each.call is not None and each.call <= call for each in self._sorted if each.at == start)
        return begin, max(begin, self.until(end))
