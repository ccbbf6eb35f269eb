"""The regions that a solver may choose: module paths, and runs of consecutive siblings, that are worth something.

They come from the calls of the trace alone. What is dominated is left out: a candidate that drops the same saved
tensors by running at least the same ops as another, while it holds at least as much and touches at least the same calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._replay import Replay, replays_of
from lowtide.plan._solution import ancestors

SEGMENTS = (1000, 2400)
"""How many segments to consider at first, and at most: every run of 45 siblings, and every run of 70."""


@dataclass(frozen=True)
class Candidate:
    """A region with all its occurrences.

    Attributes:
        paths: of its modules.
        replays: one for each occurrence.
    """

    paths: tuple[str, ...]
    replays: tuple[Replay, ...]

    @cached_property
    def seconds(self) -> float:
        """Time of all its replays."""
        return sum((r.seconds for r in self.replays), start=0.0)

    @cached_property
    def calls(self) -> frozenset[int]:
        """Its member calls and all calls inside them."""
        return frozenset(c for r in self.replays for call in r.calls for c in range(call, int(r.index.call_stop[call])))

    @cached_property
    def dropped(self) -> frozenset[int]:
        """The saved tensors that it drops."""
        return frozenset(int(slot) for r in self.replays for slot in r.dropped)

    @cached_property
    def held(self) -> frozenset[tuple[int, int]]:
        """Storage and end of all that it holds."""
        return frozenset((int(s), r.held_until) for r in self.replays for s in r.held)

    @cached_property
    def ops(self) -> tuple[tuple[int, ...], ...]:
        """The ops that run again, by replay."""
        return tuple(tuple(r.ops.tolist()) for r in self.replays if r.before != NEVER)


@dataclass(frozen=True)
class Candidates:
    """The regions worth choosing.

    Attributes:
        regions: single modules first, each in order of first call.
        complete: all of them; otherwise the longest segments are left out.
    """

    regions: tuple[Candidate, ...]
    complete: bool


def candidates(index: TraceIndex, most_segments: int = SEGMENTS[-1]) -> Candidates:
    """The candidates of a trace.

    Args:
        index: of the trace.
        most_segments: how many to consider; shorter segments come first.
    """
    segments = sorted(_segments(index), key=len)
    found = [_candidate(index, paths) for paths in [*_modules(index), *segments[:most_segments]]]
    return Candidates(tuple(_undominated([c for c in found if c.dropped])), len(segments) <= most_segments)


def _candidate(index: TraceIndex, paths: tuple[str, ...]) -> Candidate:
    return Candidate(paths, tuple(replays_of(index, paths)))


def _modules(index: TraceIndex) -> list[tuple[str, ...]]:
    return [(path,) for path, calls in index.calls_of_path.items() if index.replayable[calls].all()]


def _segments(index: TraceIndex) -> list[tuple[str, ...]]:
    """Runs of two and more consecutive siblings, each path once in a run."""
    found: dict[tuple[str, ...], None] = {}
    for siblings in index.children.values():
        for begin in range(len(siblings)):
            found.update(dict.fromkeys(_runs_from(index, siblings[begin:])))
    return list(found)


def _runs_from(index: TraceIndex, siblings: list[int]) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    paths: tuple[str, ...] = ()
    for call in siblings:
        path = index.trace.calls[call].path
        if not index.replayable[index.calls_of_path[path]].all() or _touches(path, paths):
            break
        paths = (*paths, path)
        found.append(paths)
    return found[1:]


def _touches(path: str, paths: tuple[str, ...]) -> bool:
    return path in paths or any(p in ancestors(path) or path in ancestors(p) for p in paths)


def _undominated(found: list[Candidate]) -> list[Candidate]:
    groups: dict[frozenset[int], list[Candidate]] = {}
    for candidate in found:
        rivals = groups.setdefault(candidate.dropped, [])
        if not any(_dominates(rival, candidate) for rival in rivals):
            rivals[:] = [r for r in rivals if not _dominates(candidate, r)] + [candidate]
    kept = {id(c) for rivals in groups.values() for c in rivals}
    return [c for c in found if id(c) in kept]


def _dominates(one: Candidate, other: Candidate) -> bool:
    """Choosing ``one`` instead of ``other`` is never worse: same drops and same replays, no more held, no more calls touched."""
    return one.ops == other.ops and one.held <= other.held and one.calls <= other.calls


def conflicts(found: list[Candidate]) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Which candidates may not be in one plan, ``(n, n)``: a call in both, or modules inside one another."""
    clash = np.zeros((len(found), len(found)), dtype=np.bool_)
    for group in cliques(found):
        clash[np.ix_(group, group)] = True
    np.fill_diagonal(clash, False)
    return clash


def cliques(found: list[Candidate]) -> list[list[int]]:
    """Groups of candidates of which a plan may have one at most; every conflict is in one of them.

    The candidates around one call, or around one module path, are such a group. Groups inside a larger one are left out.
    """
    around: dict[object, set[int]] = {}
    for i, candidate in enumerate(found):
        for call in candidate.calls:
            around.setdefault(call, set()).add(i)
    _add_nested_paths(found, around)
    groups = sorted({frozenset(g) for g in around.values()}, key=lambda g: (-len(g), sorted(g)))
    kept: list[frozenset[int]] = []
    for group in groups:
        if not any(group <= larger for larger in kept):
            kept.append(group)
    return [sorted(g) for g in kept]


def _add_nested_paths(found: list[Candidate], around: dict[object, set[int]]) -> None:
    """A module inside another by name may be called outside of it; a plan still names one of them only."""
    by_path: dict[str, set[int]] = {}
    for i, candidate in enumerate(found):
        for path in candidate.paths:
            by_path.setdefault(path, set()).add(i)
    for path, inner in by_path.items():
        for outer in (by_path[a] for a in ancestors(path) if a in by_path):
            around.update({(i, j): {i, j} for i in inner for j in outer})
