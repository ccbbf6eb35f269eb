"""Runs of calls one right after the other: what may be replayed as one.

All short runs are given, up to a number. Of very long models that is runs of a few blocks; of longer ones those of 4, 8, 16, … siblings are
given as well, each starting half a run after the one before.
"""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.plan._equal import EqualBlocks
from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._solution import ancestors

Run = tuple[int, ...]


def runs(index: TraceIndex, equal: EqualBlocks, most: int) -> tuple[list[tuple[str, ...]], bool]:
    """Paths of runs of two and more calls, each path once in a run; and whether those are all.

    Calls inside a block that is like another one are left out.
    """
    found: dict[tuple[str, ...], None] = {}
    growing: list[Run] = [(call,) for call in range(len(index.parent)) if _is_allowed(index, equal, (), call)]
    while growing:
        growing = [longer for run in growing for longer in _longer(index, equal, run)]
        found.update((_paths(index, run), None) for run in growing)
        if len(found) > most:
            length = len(growing[0])
            return [*list(found)[:most], *(_paths(index, run) for run in _long(index, equal, length))], False
    return list(found), True


def _paths(index: TraceIndex, run: Run) -> tuple[str, ...]:
    return tuple(index.trace.calls[call].path for call in run)


def _longer(index: TraceIndex, equal: EqualBlocks, run: Run) -> Iterator[Run]:
    for call in _next_calls(index, run):
        if _is_allowed(index, equal, run, call) and index.joins(run, call) and not index.are_apart(run[-1], call):
            yield (*run, call)


def _next_calls(index: TraceIndex, run: Run) -> list[int]:
    """Siblings follow each other; from leaves, which are what norms and activations are, a run also goes into and out of other modules.

    Of functions it passes over those alone that are not offered, and from one it goes no further than its module.
    """
    following = index.following(run[-1])
    passed = next((i for i, call in enumerate(following) if index.is_function[call] and index.is_offered[call]), len(following))
    following = following[: passed + 1]
    if not all(index.is_leaf(call) for call in run):
        if index.is_leaf(run[-1]) and index.parent[run[-1]] != index.parent[run[-2]]:
            return []
        following = [call for call in following if index.parent[call] == index.parent[run[-1]] or _ends_in(index, run, call)]
    callers = [int(index.parent[call]) for call in run if index.is_function[call]]
    return [call for call in following if all(call < index.call_stop[caller] for caller in callers)]


def _ends_in(index: TraceIndex, run: Run, call: int) -> bool:
    """Whether a run of one block may end in the first module of what follows: that saves what the block hands on."""
    outer = [not index.is_leaf(member) for member in run]
    return outer[-1] and sum(outer) == 1 and index.is_leaf(call) and not index.is_function[call]


def _is_allowed(index: TraceIndex, equal: EqualBlocks, run: Run, call: int) -> bool:
    if equal.copied[call] not in (NEVER, call):
        return False
    if not index.is_offered[call] or (index.is_function[call] and not _writes_to_own(index, run, call)):
        return False
    path = index.trace.calls[call].path
    return bool(index.replayable[index.calls_of_path[path]].all()) and not _touches(path, _paths(index, run))


def _writes_to_own(index: TraceIndex, run: Run, call: int) -> bool:
    """Whether a function writes to nothing but what the run has made."""
    return index.written_in(call) <= {storage for member in run for storage in index.trace.calls[member].outputs}


def _touches(path: str, paths: tuple[str, ...]) -> bool:
    return path in paths or any(p in ancestors(path) or path in ancestors(p) for p in paths)


def _long(index: TraceIndex, equal: EqualBlocks, longer_than: int) -> Iterator[Run]:
    """Runs of 4, 8, 16, … siblings that are no leaves."""
    for siblings in index.children.values():
        blocks = [call for call in siblings if not index.is_leaf(call)]
        length = 4
        while length <= len(blocks) // 2:
            if length > longer_than:
                starts = range(0, len(blocks) - length + 1, length // 2)
                yield from (run for i in starts if _is_run(index, equal, run := tuple(blocks[i : i + length])))
            length *= 2


def _is_run(index: TraceIndex, equal: EqualBlocks, run: Run) -> bool:
    return all((*run[:i], run[i]) in _longer(index, equal, run[:i]) for i in range(1, len(run)))
