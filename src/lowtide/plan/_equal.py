"""Which calls of a step are alike, so that what is worth choosing inside one of them is worth choosing inside all.

Blocks of a model mostly do the same ops on the same sizes in the same time. Only names of candidates are taken over from one to the
others: what each does to the step is read from the trace for every block by itself, so that nothing hangs on how alike they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from lowtide.plan._index import NEVER, Ints, TraceIndex, ints

_MANY_CALLS = 300
"""Steps with fewer module calls are searched call by call."""
_FEWEST = 4


class EqualBlocks:
    """Groups of calls right inside the same call that are alike, outermost first.

    Attributes:
        original: by call that is like an earlier one and is not looked into itself: the call to take candidates from.
    """

    def __init__(self, index: TraceIndex) -> None:
        self._index = index
        self._names: dict[str, int] = {}
        self.original: dict[int, int] = dict(self._found()) if index.module_calls > _MANY_CALLS else {}

    @cached_property
    def copied(self) -> Ints:
        """By call whether it is one of those, or inside one: the call that it is or is in, else ``NEVER``."""
        found = np.full(len(self._index.parent), NEVER, dtype=np.int64)
        for call in self.original:
            found[call : self._index.call_stop[call]] = call
        return found

    def _found(self) -> Iterator[tuple[int, int]]:
        """Of each group the first, the middle one and the last are looked into; the others are like the middle one."""
        waiting = [NEVER]
        while waiting:
            inside = self._index.children.get(waiting.pop(), [])
            alike: dict[bytes, list[int]] = {}
            for call in inside:
                alike.setdefault(self._likeness(call), []).append(call)
            for group in alike.values():
                if len(group) < _FEWEST or self._index.is_leaf(group[0]):
                    waiting += group
                    continue
                middle = group[len(group) // 2]
                yield from ((call, middle) for call in group[1:-1] if call != middle)

    def _likeness(self, call: int) -> bytes:
        """Equal for calls that do the same: ops, storages, saved tensors, functions and calls inside, counted from its start."""
        index = self._index
        start, end, stop = int(index.start[call]), int(index.end[call]), int(index.call_stop[call])
        ops = np.arange(start, end)
        storages = index.storages_born_in(ops)
        slots = index.slots_of_call(call)
        made_inside = index.born[index.slot_storage[slots]] - start
        parts = (
            ints(self._number(index.trace.ops[op].name) for op in range(start, end)),
            index.seconds[start:end],
            index.workspace[start:end],
            index.bytes[storages],
            index.born[storages] - start,
            np.minimum(index.freed[storages], end) - start,
            index.position[slots] - start,
            np.maximum(made_inside, NEVER),
            index.start[call:stop] - start,
            index.end[call:stop] - start,
            ints(self._number(self._relative(call, inside)) for inside in range(call, stop)),
            ints(self._number(f"{f.function} {f.start - start}") for _, f in index.functions_in(call)),
        )
        return b"|".join(part.tobytes() for part in parts)

    def _relative(self, call: int, inside: int) -> str:
        return self._index.trace.calls[inside].path.removeprefix(self._index.trace.calls[call].path)

    def _number(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))
