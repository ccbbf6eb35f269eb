"""A trace as arrays, with the questions that simulating and solving ask of it over and over.

Calls are recorded in order of entry, so the calls inside call ``c`` are those from ``c`` up to ``call_stop[c]``: whether
an op or a saved tensor belongs to a call is one comparison of ranges.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.records import Category, Phase, StepTrace

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

CATEGORIES = tuple(Category)
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
        seconds, workspace, op_call, forward: by op.
        bytes, category, born, freed, resident: by storage; ``category`` indexes ``CATEGORIES``.
        slot_storage, slot_call, position, used, released: by saved tensor.
        slot_freed: by saved tensor, until when it is alive without autograd.
        parent, call_stop, start, end, replayable: by call; a call is replayable when all calls inside it are.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self._read_ops(trace)
        self._read_storages(trace)
        self._read_slots(trace)
        self._read_calls(trace)

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

    @cached_property
    def _storages_by_birth(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.born, kind="stable")
        order = order[~self.resident[order]]
        return order, self.born[order]

    @cached_property
    def _slots_by_call(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.slot_call, kind="stable")
        return order, self.slot_call[order]

    def slots_of_call(self, call: int) -> Ints:
        """Tensors that were saved in a call or in a call inside it."""
        order, calls = self._slots_by_call
        low, high = np.searchsorted(calls, [call, self.call_stop[call]])
        return order[low:high]

    def storages_born_in(self, ops: Ints) -> Ints:
        """Storages that one of these ops (ascending) allocated, in order of birth."""
        order, born = self._storages_by_birth
        low, high = np.searchsorted(born, [ops[0], ops[-1] + 1]) if len(ops) else (0, 0)
        return order[low:high][np.isin(born[low:high], ops)]
