"""Parameters that ``fully_shard`` gathers, as a traced step shows them: storages that are filled before a module's call and emptied after.

The ops that gather are run by a hook of the module, outside of its call and so outside of a region on it, but inside of one on a module
around it. Whether a replay of that one gathers again depends on what is whole by then, so the ops are taken out of all calls, and a
``Gather`` says it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.records import Gather, Phase, StepTrace

_FIRST = "fsdp.all_gather_copy_in"


def with_gathers(trace: StepTrace, refills: Sequence[tuple[int, int]]) -> StepTrace:
    """Note the gathers of a step.

    Args:
        trace: of the step.
        refills: key and row of every storage that was filled in the step, in order.
    """
    if not refills:
        return trace
    by_call = _filled_for(trace, [row for _, row in refills])
    later = _filled_in_backward(trace, refills)
    gathers, ops = [], list(trace.ops)
    for call, rows in sorted(by_call.items()):
        filling = range(_begin(trace, rows), trace.calls[call].start)
        for op in filling:
            ops[op] = replace(ops[op], call=None)
        gathers.append(Gather(call, tuple(rows), sum((ops[op].seconds for op in filling), start=0.0), *_whole(trace, rows, later)))
    return replace(trace, ops=tuple(ops), gathers=tuple(gathers))


def _filled_for(trace: StepTrace, rows: Sequence[int]) -> dict[int, list[int]]:
    """By call, the rows that were filled in forward right before it."""
    starts = [call.start for call in trace.calls]
    found: dict[int, list[int]] = {}
    for row in rows:
        born = trace.storages[row].born
        call = bisect_right(starts, born)
        if trace.ops[born].phase is Phase.FORWARD and call < len(starts):
            found.setdefault(call, []).append(row)
    return found


def _filled_in_backward(trace: StepTrace, refills: Sequence[tuple[int, int]]) -> dict[int, int]:
    """By row that was filled in forward, the next one of the same storage, filled in backward."""
    found, last = {}, dict[int, int]()
    for key, row in refills:
        if trace.ops[trace.storages[row].born].phase is not Phase.FORWARD and key in last:
            found[last.pop(key)] = row
        else:
            last[key] = row
    return found


def _begin(trace: StepTrace, rows: Sequence[int]) -> int:
    """The first op of what fills these rows."""
    born = min(trace.storages[row].born for row in rows)
    return next((op for op in range(born, -1, -1) if trace.ops[op].name.startswith(_FIRST)), born)


def _whole(trace: StepTrace, rows: Sequence[int], later: dict[int, int]) -> Iterator[int]:
    """From which op of backward until which they are whole anyway: filled again, or kept so from forward on."""
    backward = [i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD]
    begin, end = (backward[0], backward[-1] + 1) if backward else (len(trace.ops), len(trace.ops))
    whole = [trace.storages[row] for row in [*rows, *(later[row] for row in rows if row in later)]]
    found = [(max(storage.born, begin), min(storage.freed, end)) for storage in whole if storage.freed > begin]
    yield min((start for start, _ in found), default=end)
    yield max((until for _, until in found), default=end)
