"""A model as a chain of stages: modules that run one right after the other, each on what the one before it made.

What the schedules of the literature are stated over. A schedule is a tree here: a plan has regions inside regions, since the replay of a
run of stages may hold inputs of runs within it and leave their insides to replays of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lowtide.errors import InvalidInputError, PlanError
from lowtide.plan._index import Ints, TraceIndex
from lowtide.plan._replay import replays_of
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import families

_FEWEST = 2
_ABOUT = 0.8
_MOST_SIBLINGS = 20


@dataclass(frozen=True)
class Run:
    """Stages ``start <= i < stop`` as one region, with runs inside it."""

    start: int
    stop: int
    inside: tuple[Run, ...] = ()


Schedule = tuple[Run, ...]
"""What is replayed of a chain: runs that do not overlap, in order. Stages in none of them are left as they are."""


@dataclass(frozen=True)
class Chain:
    """The stages of a model, in order.

    Attributes:
        paths: of their modules.
        calls: of each, one.
    """

    paths: tuple[str, ...]
    calls: tuple[int, ...]

    def regions(self, schedule: Schedule) -> list[PlannedRegion]:
        """A schedule as regions of a plan."""
        return [PlannedRegion(self.paths[run.start : run.stop], inside=tuple(self.regions(run.inside))) for run in schedule]

    def grouped(self, most: int) -> list[range]:
        """The stages in ``most`` groups or fewer, alike in number."""
        length = -(-len(self.paths) // most)
        return [range(i, min(i + length, len(self.paths))) for i in range(0, len(self.paths), length)]


def chain_of(index: TraceIndex, solver: str) -> Chain:
    """The chain of a step: of those whose stages save about as much as those of any, the one of the most stages.

    Args:
        index: of the trace.
        solver: for the message.

    Raises:
        InvalidInputError: the step has none.
    """
    read = [_read(index, paths) for paths in _sequences(index)]
    found = [(chain, _saved_bytes(index, chain)) for chain in read if isinstance(chain, Chain)]
    if found:
        most = max(size for _, size in found)
        return max((chain for chain, size in found if size >= _ABOUT * most), key=lambda chain: len(chain.paths))
    wrong = next((why for why in read if isinstance(why, str)), "The traced step calls no modules one after the other")
    raise InvalidInputError(
        f"the solver {solver!r} plans chains: {_FEWEST} modules or more, each called once, one right after the other, each on what the "
        f"one before it made. {wrong}; choose another solver, or auto"
    )


def _sequences(index: TraceIndex) -> Iterator[list[str]]:
    """Modules of one class, and modules called in the same one; of those, the longest."""
    yield from families(index)
    siblings = [[index.trace.calls[call].path for call in calls if not index.is_function[call]] for calls in index.children.values()]
    yield from sorted((paths for paths in siblings if len(paths) >= _FEWEST), key=len, reverse=True)[:_MOST_SIBLINGS]


def _saved_bytes(index: TraceIndex, chain: Chain) -> int:
    return bytes_of(index, index.slot_storage[np.concatenate([index.slots_of_call(call) for call in chain.calls])])


def _read(index: TraceIndex, paths: list[str]) -> Chain | str:
    """The chain of these modules, or what keeps them from being one."""
    several = next((path for path in paths if len(index.calls_of_path[path]) > 1), None)
    if several is not None:
        return f"Of its modules, {several!r} is called {len(index.calls_of_path[several])} times"
    try:
        replays = replays_of(index, tuple(paths))
    except PlanError as error:
        return f"In the traced step that is not so: {error}"
    if len(replays) > 1:  # sharded units, each gathered by itself
        return f"In the traced step {paths[0]!r} and those after it are not replayed as one"
    skip = _skip(index, replays[0].calls)
    return skip or Chain(tuple(paths), replays[0].calls)


def _skip(index: TraceIndex, calls: tuple[int, ...]) -> str:
    """What takes something that was made before the stage before it."""
    made_by: dict[int, int] = {}
    for i, call in enumerate(calls):
        for storage in index.trace.calls[call].inputs:
            if made_by.get(storage, i - 1) < i - 1:
                one, other = (index.trace.calls[c].path for c in (call, calls[made_by[storage]]))
                return f"In the traced step {one!r} takes what {other!r} made, which is not the one before it"
        made_by.update(dict.fromkeys(index.trace.calls[call].outputs, i))
    return ""


def bytes_of(index: TraceIndex, storages: Ints) -> int:
    """Of some storages, each counted once, without what was there before the step."""
    once = np.unique(storages)
    return int(index.bytes[once][~index.resident[once]].sum())
