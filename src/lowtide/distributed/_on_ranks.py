"""What one of several ranks holds, from the trace of a step on one.

The trace of the whole model on one process is rewritten: storages of parameters, gradients and optimizer state become the rank's share, and
what the engine adds is put where it is alive. ``simulate`` and ``solve`` then answer for a rank as they do for a process alone.

    zero  engine                          added
    0     DDP                             one buffer for each gradient, in buckets
    1     DDP, ZeroRedundancyOptimizer    the same; optimizer state of the rank's own parameters alone
    2     fully_shard that keeps whole    parameters of a unit whole from its forward to its backward
    3     fully_shard                     whole during its forward and during its backward

For stages 2 and 3 (Rajbhandari et al. 2020; Zhao et al. 2023), a unit's gradients are whole until its backward is over, and then are cut
up. A flat buffer of a unit's size is there while a unit is gathered: in forward until the next unit is, in backward (stage 3) one unit
ahead. One more holds the gradients that are being reduced, until those of the next unit are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import InvalidInputError
from lowtide.records import Category, Phase, StepTrace, Storage


@dataclass(frozen=True, slots=True)
class _Span:
    """A unit in time: the ops of its forward and of its backward, ``start <= op < end`` each."""

    forward: tuple[int, int]
    backward: tuple[int, int]


def on_ranks(trace: StepTrace, ranks: int, zero: int, units: Sequence[str] = (), rank: int = 0) -> StepTrace:
    """Rewrite the trace of a step on one process into that of one of several ranks.

    Args:
        trace: of the un-checkpointed step with a rank's own batch, optimizer included where there is one.
        ranks: how many share the state.
        zero: 0 to 3: nothing, optimizer state (1), gradients (2), parameters (3) are shared.
        units: for 2 and 3, paths of the modules that are sharded one by one; the rest of the model is a unit of its own.
        rank: of the ranks; they differ where parameters are dealt out whole (1).

    Raises:
        InvalidInputError: no such stage of ZeRO, too few ranks, or a unit that the step never calls.
    """
    if zero not in (0, 1, 2, 3) or not 0 <= rank < ranks:
        raise InvalidInputError(f"zero is 0 to 3 and rank one of {ranks}; found zero={zero}, rank={rank}")
    if ranks == 1:
        return trace
    return _replicated(trace, ranks, rank, zero == 1) if zero < 2 else _Sharded(trace, ranks, zero, units).trace()


def _replicated(trace: StepTrace, ranks: int, rank: int, deal: bool) -> StepTrace:
    sizes = [storage.bytes for storage in trace.storages if storage.category is Category.PARAMETER and storage.resident]
    storages = _dealt(trace.storages, _own(sizes, ranks, rank)) if deal else trace.storages
    buckets = Storage(sum(sizes), Category.GRADIENT, 0, len(trace.ops), True)
    return replace(trace, storages=(*storages, buckets))


def _own(sizes: Sequence[int], ranks: int, rank: int) -> Counter[int]:
    """The sizes of a rank's parameters: each, from the largest down, goes to the rank that has least."""
    loads: list[list[int]] = [[] for _ in range(ranks)]
    for size in sorted(sizes, reverse=True):
        min(loads, key=sum).append(size)
    return Counter(loads[rank])


def _dealt(storages: Sequence[Storage], own: Counter[int]) -> tuple[Storage, ...]:
    """Optimizer state of the rank's own parameters: as many states of each size as there are such parameters, of all that have it."""
    all_of = Counter(s.bytes for s in storages if s.category is Category.OPTIMIZER)
    parameters = Counter(s.bytes for s in storages if s.category is Category.PARAMETER and s.resident)
    left = {size: count * own[size] // parameters[size] if parameters[size] else count for size, count in all_of.items()}
    found = []
    for storage in storages:
        is_state = storage.category is Category.OPTIMIZER
        if is_state:
            left[storage.bytes] -= 1
        found.append(replace(storage, bytes=0) if is_state and left[storage.bytes] < 0 else storage)
    return tuple(found)


class _Sharded:
    """The trace under ``fully_shard``."""

    def __init__(self, trace: StepTrace, ranks: int, zero: int, units: Sequence[str]) -> None:
        self._trace, self._ranks, self._zero = trace, ranks, zero
        self._end = len(trace.ops)
        self._unit_of_call = _unit_of_call(trace, units)
        self._backward_end = 1 + max((i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), default=0)
        self._owner = self._owners()
        self._spans = {unit: self._span(unit) for unit in (*units, "")}

    def trace(self) -> StepTrace:
        """Rewritten."""
        shared = tuple(self._share(index, storage) for index, storage in enumerate(self._trace.storages))
        return replace(self._trace, storages=(*shared, *self._gathered(), *self._buffers(), *self._shards()))

    def _owners(self) -> dict[int, str]:
        """Of each parameter's storage, the unit whose forward reads it, and of each gradient's the unit whose backward made it."""
        found: dict[int, str] = {}
        for op in self._trace.ops:
            if op.phase is Phase.FORWARD:
                for read in op.reads:
                    found.setdefault(read, self._unit_of(op.call))
        for index, storage in enumerate(self._trace.storages):
            if storage.category is Category.GRADIENT and not storage.resident:
                found[index] = self._unit_of(self._trace.ops[storage.born].call)
        return found

    def _unit_of(self, call: int | None) -> str:
        return "" if call is None else self._unit_of_call[call]

    def _span(self, unit: str) -> _Span:
        ops = self._trace.ops
        if unit == "":
            forward = max((i for i, op in enumerate(ops) if op.phase is Phase.FORWARD), default=0) + 1
            return _Span((0, forward), (forward, self._backward_end))
        own = [i for i, op in enumerate(ops) if self._unit_of(op.call) == unit]
        forwards = [i for i in own if ops[i].phase is Phase.FORWARD]
        backwards = [i for i in own if ops[i].phase is Phase.BACKWARD]
        if not forwards or not backwards:
            raise InvalidInputError(f"the step never goes through {unit!r}, which is to be sharded: name modules that it calls")
        return _Span((forwards[0], forwards[-1] + 1), (backwards[0], backwards[-1] + 1))

    def _is_parameter(self, storage: Storage) -> bool:
        return storage.category is Category.PARAMETER and storage.resident

    def _share(self, index: int, storage: Storage) -> Storage:
        """A storage as the rank has it: a share of parameters and optimizer state; gradients until they are cut up."""
        if self._is_parameter(storage) or storage.category is Category.OPTIMIZER:
            return replace(storage, bytes=self._part(storage.bytes))
        if storage.category is Category.GRADIENT and storage.resident:
            return replace(storage, bytes=self._part(storage.bytes))
        if storage.category is Category.GRADIENT:
            until = self._spans[self._owner.get(index, "")].backward[1]
            return replace(storage, freed=min(max(until, storage.born + 1), storage.freed))
        is_update = not storage.resident and self._trace.ops[storage.born].phase is Phase.OPTIMIZER
        return replace(storage, bytes=self._part(storage.bytes)) if is_update else storage

    def _part(self, size: int) -> int:
        return -(-size // self._ranks)

    def _sizes(self) -> Counter[str]:
        """Bytes of each unit's parameters."""
        found: Counter[str] = Counter()
        for index, storage in enumerate(self._trace.storages):
            if self._is_parameter(storage):
                found[self._owner.get(index, "")] += storage.bytes
        return found

    def _gathered(self) -> Iterator[Storage]:
        """Whole parameters, from before the unit's first op on: a replay of the unit, which comes before that, finds them."""
        sizes = self._sizes()
        for unit, span in self._spans.items():
            if unit == "" or self._zero == 2:
                yield self._whole(sizes[unit], span.forward[0], span.backward[1])
            else:
                yield self._whole(sizes[unit], *span.forward)
                yield self._whole(sizes[unit], *span.backward)

    def _whole(self, size: int, start: int, end: int) -> Storage:
        return Storage(size, Category.PARAMETER, max(start - 1, 0), end, start == 0)

    def _buffers(self) -> Iterator[Storage]:
        """Flat buffers of what is gathered and of what is reduced."""
        sizes = self._sizes()
        ahead = sorted(self._spans, key=lambda unit: self._spans[unit].forward[0] - (unit == ""))
        starts = [self._spans[unit].forward[0] for unit in ahead]
        for unit, start, end in zip(ahead, starts, [*starts[1:], self._spans[""].forward[1]], strict=True):
            yield self._buffer(sizes[unit], start, end)
        back = sorted((unit for unit in self._spans if unit), key=lambda unit: self._spans[unit].backward[0])
        ends = [self._spans[unit].backward[1] for unit in back]
        begins = [self._spans[""].backward[0], *(self._spans[unit].backward[0] for unit in back)]
        for unit, end, until, begin, gone in zip(back, ends, [*ends[1:], self._backward_end], begins, begins[1:], strict=False):
            yield self._buffer(sizes[unit], end, until)
            if self._zero == 3:
                yield self._buffer(sizes[unit], begin, gone)

    def _buffer(self, size: int, start: int, end: int) -> Storage:
        return Storage(size, Category.TEMPORARY, max(start - 1, 0), max(start, end), start == 0)

    def _shards(self) -> Iterator[Storage]:
        """Shares of gradients, from the end of the unit's backward on, as long as the whole ones lived."""
        for index, storage in enumerate(self._trace.storages):
            if storage.category is Category.GRADIENT and not storage.resident:
                begin = self._spans[self._owner.get(index, "")].backward[1]
                if storage.freed > begin:
                    yield Storage(self._part(storage.bytes), Category.GRADIENT, min(begin, self._end - 1), storage.freed, False)


def _unit_of_call(trace: StepTrace, units: Sequence[str]) -> list[str]:
    """Of each call, the innermost unit around it."""
    found: list[str] = []
    for call in trace.calls:  # in order of entry: the one around it comes first
        found.append(call.path if call.path in units else "" if call.parent is None else found[call.parent])
    return found
