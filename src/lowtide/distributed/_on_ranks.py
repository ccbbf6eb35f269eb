"""What one of several ranks holds, from the trace of a step on one.

The trace of the whole model on one process is rewritten: storages of parameters, gradients and optimizer state become the rank's share, and
what the engine adds is put where it is alive. ``simulate`` and ``solve`` then answer for a rank as they do for a process alone.

    zero  engine                          added
    0     DDP                             one buffer for each gradient, in buckets
    1     DDP, ZeroRedundancyOptimizer    the same; optimizer state of the rank's own parameters alone
    2     fully_shard that keeps whole    parameters of a unit whole from its forward to its backward
    3     fully_shard                     whole during its forward and during its backward

Stages 2 and 3 are in ``_sharded``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lowtide.distributed._gather_cost import GatherCost
from lowtide.distributed._sharded import sharded
from lowtide.errors import InvalidInputError
from lowtide.records import Category, StepTrace, Storage


def on_ranks(
    trace: StepTrace,
    ranks: int,
    zero: int,
    units: Sequence[str] = (),
    rank: int = 0,
    *,
    forward_only: Sequence[str] = (),
    gather: GatherCost | None = None,
) -> StepTrace:
    """Rewrite the trace of a step on one process into that of one of several ranks.

    Args:
        trace: of the un-checkpointed step with a rank's own batch, optimizer included where there is one.
        ranks: how many share the state.
        zero: 0 to 3: nothing, optimizer state (1), gradients (2), parameters (3) are shared.
        units: for 2 and 3, paths of the modules that are sharded one by one; the rest of the model is a unit of its own.
        rank: of the ranks; they differ where parameters are dealt out whole (1).
        forward_only: those of the units that backward does not gather (``set_unshard_in_backward(False)``).
        gather: what it takes to gather parameters, see ``measure_gather``: where a replay gathers what the step without it gathers less
            often, that counts in the time of a plan; nothing by default.

    Raises:
        InvalidInputError: no such stage of ZeRO, too few ranks, or a unit that the step never calls.
    """
    if zero not in (0, 1, 2, 3) or not 0 <= rank < ranks:
        raise InvalidInputError(f"zero is 0 to 3 and rank one of {ranks}; found zero={zero}, rank={rank}")
    if ranks == 1:
        return trace
    if zero < 2:
        return _replicated(trace, ranks, rank, zero == 1)
    return sharded(trace, ranks, units, forward_only, gather, keeps_whole=zero == 2)


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
