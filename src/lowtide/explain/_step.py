"""One traced step with the questions that every explanation asks of it: how long a storage lives, and whose it is.

Where a trace does not say which op of forward an op of backward stems from, it is taken to work for the module whose saved
tensor backward asked for last.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.records import Category, Op, Phase, SavedTensor, StepTrace

Ints = npt.NDArray[np.int64]

OUTSIDE = "outside any module"
ROOT = "(model)"


def path_name(path: str | None) -> str:
    """A module path as people are shown it.

    >>> path_name("blocks.0"), path_name(""), path_name(None)
    ('blocks.0', '(model)', 'outside any module')
    """
    return OUTSIDE if path is None else path or ROOT


def is_inside(path: str | None, outer: str) -> bool:
    """Whether a path is that of a module or of one inside it; everything that is in a module is in the root.

    >>> is_inside("blocks.0.mlp", "blocks.0"), is_inside("blocks.01", "blocks.0"), is_inside("blocks", ""), is_inside(None, "")
    (True, False, True, False)
    """
    return path is not None and (not outer or path == outer or path.startswith(f"{outer}."))


class StepView:
    """A trace with lifetimes and owners worked out; explanations of one trace share one.

    Attributes:
        trace: what was recorded.
        bytes, born, natural_end: by storage; ``natural_end`` without what autograd saved of it.
        end: by storage, the op before which it is gone with everything that autograd saved.
    """

    def __init__(self, trace: StepTrace) -> None:
        self.trace = trace
        self.bytes: Ints = np.array([s.bytes for s in trace.storages], dtype=np.int64)
        self.born: Ints = np.array([s.born for s in trace.storages], dtype=np.int64)
        self.natural_end: Ints = np.array([s.freed for s in trace.storages], dtype=np.int64)
        self.end = self.natural_end.copy()
        slots = np.array([s.storage for s in trace.saved], dtype=np.int64)
        np.maximum.at(self.end, slots, np.array([s.released for s in trace.saved], dtype=np.int64))

    def alive_at(self, op: int) -> list[int]:
        """Storages that hold bytes while ``op`` runs, the largest first."""
        alive = np.flatnonzero((self.born <= op) & (op < self.end) & (self.bytes > 0))
        return [int(i) for i in alive[np.argsort(-self.bytes[alive], kind="stable")]]

    @cached_property
    def slots_of_storage(self) -> dict[int, list[int]]:
        """Storage to the saved tensors on it, in order."""
        found: dict[int, list[int]] = {}
        for slot, tensor in enumerate(self.trace.saved):
            found.setdefault(tensor.storage, []).append(slot)
        return found

    @cached_property
    def backward_of(self) -> dict[int, list[int]]:
        """Op of forward to the ops that ran for the backward node which it made, in order."""
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.trace.ops):
            if op.origin is not None:
                found.setdefault(op.origin, []).append(i)
        return found

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Storage to the ops that read or wrote it, in order."""
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.trace.ops):
            for storage in {*op.reads, *op.writes}:
                found.setdefault(storage, []).append(i)
        return found

    @cached_property
    def born_at(self) -> dict[int, list[int]]:
        """Op to the storages that it allocated."""
        found: dict[int, list[int]] = {}
        for storage, record in enumerate(self.trace.storages):
            if not record.resident:
                found.setdefault(record.born, []).append(storage)
        return found

    def op(self, index: int) -> Op | None:
        """The op, or ``None`` after the last one."""
        return self.trace.ops[index] if 0 <= index < len(self.trace.ops) else None

    def path_of_call(self, call: int | None) -> str | None:
        """Module path of a call; ``None`` outside any."""
        return None if call is None else self.trace.calls[call].path

    def path_of_op(self, index: int) -> str | None:
        """Path of the module that an op works for; ``None`` outside any."""
        op = self.op(index)
        if op is None:
            return None
        if op.call is None and op.phase is Phase.BACKWARD and getattr(op, "origin", None) is None:
            return self._path_in_backward(index)
        return self.path_of_call(op.call)

    def _path_in_backward(self, index: int) -> str | None:
        uses, slots = self._uses
        at = int(np.searchsorted(uses, index, side="right")) - 1
        return self.path_of_call(self.trace.saved[int(slots[at])].call) if at >= 0 else None

    @cached_property
    def _uses(self) -> tuple[Ints, Ints]:
        """Ops at which backward first asks for something, and what; in order."""
        used = [(s.used, slot) for slot, s in enumerate(self.trace.saved) if s.used is not None]
        table = np.array(sorted(used), dtype=np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def owner(self, storage: int) -> str | None:
        """Path of the module that made a storage; of what was there before the step, the module that first touched it."""
        if not self.trace.storages[storage].resident:
            return self.path_of_op(self.trace.storages[storage].born)
        touched = self.readers.get(storage, [])
        return next((self.path_of_op(op) for op in touched if self.trace.ops[op].phase is Phase.FORWARD), None)

    def maker(self, storage: int) -> Op | None:
        """The op that allocated a storage; ``None`` for what was there before the step."""
        record = self.trace.storages[storage]
        return None if record.resident else self.op(record.born)

    def is_activation(self, storage: int) -> bool:
        """Made by the step itself, in forward, and neither parameter nor gradient nor optimizer state."""
        record = self.trace.storages[storage]
        return not record.resident and record.category is Category.ACTIVATION

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Sum over different storages."""
        return int(sum(self.trace.storages[s].bytes for s in set(storages)))


def dtype_of(tensor: SavedTensor) -> str:
    """Dtype of a saved tensor, such as ``float32``; empty in traces that do not say."""
    return str(getattr(tensor, "dtype", "") or "").removeprefix("torch.")


def node_of(tensor: SavedTensor) -> str:
    """The backward node that holds it; a node that backward never ran has no name."""
    return tensor.node or "(not used by backward)"
