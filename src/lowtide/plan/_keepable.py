"""Which calls of torch functions inside a region can keep their results, so that a replay does not run them.

A call can when what it returns is its own and stays as it is: made by one of its ops, and not written to afterwards, for then
the engine would hold a copy. Not in modules that run more than once in a step: what is kept of each run is not yet foreseen to the byte.
What one member of a region hands to the next is made again: a later member does not know that it is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._index import CAST, Ints, TraceIndex, ints
from lowtide.plan._solution import KeptCall


@dataclass(frozen=True)
class Keepable:
    """One call that can be kept.

    Attributes:
        call: how a plan names it.
        start, end: it ran the ops ``start <= i < end``.
        outputs: storages of its results.
    """

    call: KeptCall
    start: int
    end: int
    outputs: tuple[int, ...]


def keepable_calls(index: TraceIndex, members: Sequence[int]) -> list[Keepable]:
    """The calls that can be kept in one occurrence of a region, in order.

    Args:
        index: of the trace.
        members: the region's member calls.
    """
    passed_on = {storage for member in members[:-1] for storage in index.trace.calls[member].outputs}
    found = (keepable for member in members for keepable in _in_member(index, member))
    return [keepable for keepable in found if passed_on.isdisjoint(keepable.outputs)]


def _in_member(index: TraceIndex, member: int) -> list[Keepable]:
    if member not in index.keepables:
        index.keepables[member] = _read(index, member)
    return index.keepables[member]


def _read(index: TraceIndex, member: int) -> list[Keepable]:
    counts: dict[str, int] = {}
    found = []
    for place, function in index.functions_in(member):
        nth = counts.get(function.function, 0)
        counts[function.function] = nth + 1
        path = index.trace.calls[function.call].path
        if index.function_is_own[place] and len(index.calls_of_path[path]) == 1:
            name = KeptCall(path, function.function, nth)
            found.append(Keepable(name, function.start, function.end, function.outputs))
    return found


def kept_in(index: TraceIndex, members: Sequence[int], kept: Sequence[KeptCall]) -> list[Keepable]:
    """The calls that a plan keeps, as they are in one occurrence of its region.

    Raises:
        PlanError: one was not called there, or cannot be kept.
    """
    found = {keepable.call: keepable for keepable in keepable_calls(index, members)} if kept else {}
    for call in kept:
        if call not in found:
            where = f"call {call.index} of {call.function} in {call.module!r}"
            raise PlanError(f"the plan keeps {where}, but the traced step has no such call whose results can be kept")
    return sorted((found[call] for call in kept), key=lambda k: k.start)


def skipped_ops(index: TraceIndex, kept: Sequence[Keepable]) -> Ints:
    """The ops that a replay does not run, ascending: those of kept calls, but for casts that autocast makes of their arguments."""
    found = [np.arange(k.start, k.end) for k in kept]
    ops = np.concatenate(found).astype(np.int64) if found else ints(())
    return ops[[index.trace.ops[op].name != CAST for op in ops.tolist()]] if len(ops) else ops
