"""Regions with regions inside, as candidates: for each module and run of modules, what to replay inside its replay so that it peaks lower.

A region that is replayed as one has all that its members save at hand when its backward begins. With regions inside, its replay makes
no more than their inputs. Which ones is a path through its layers, as a whole plan is one (``_path``): each edge is a region, which
may have others inside in turn, or a layer that is left as it is. A label is a way so far: bytes held for what lies behind, the
highest level of memory that backward will come to there, and the time. The persistent schedules of chains (Beaumont et al. 2019) are
such trees; here stages may be parts of blocks, and what is held may skip.

Levels and what is held add up here as if regions held nothing in common; the few best ways of each region are read from the trace,
and those are kept that peak lower than the region without any inside. Complexity: labels times edges inside, for each region, the
shorter first, with a limit on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._candidate import Candidate
from lowtide.plan._index import NEVER, Ints, TraceIndex, ints
from lowtide.plan._local import Levels
from lowtide.plan._path import Paths
from lowtide.plan._solution import PlannedRegion, ancestors
from lowtide.plan._trees import trees_of

_FEW_CALLS, _MANY_CALLS = 24, 300
_MOST_LABELS = 12
_MOST_READ = 2
_MOST_OPTIONS = 2
_WORTH = 0.99
_MOST_WORK = 30_000
"""Edges that are looked at, over all regions."""


@dataclass(frozen=True)
class _Edge:
    """A way over some layers.

    Attributes:
        start, stop: it is over the layers ``start <= i < stop``.
        region: what is replayed; nothing where a layer is left as it is.
        held: storages that it holds from the replay around it until its own backward is over.
        level: bytes that its own replay and backward come to.
        seconds: of its replays.
        around: for each module of the region, itself and those around it by name.
    """

    start: int
    stop: int
    region: PlannedRegion | None
    held: frozenset[int]
    level: int
    seconds: float
    around: tuple[frozenset[str], ...] = ()

    def is_inside(self, outer: Candidate) -> bool:
        """Whether its region may be inside another."""
        if self.region is None or self.region.paths == outer.paths:
            return False
        return not any(map(frozenset(outer.paths).isdisjoint, self.around))


_Label = tuple[int, int, float, tuple[PlannedRegion, ...]]
"""A way to a node: the highest level of memory before it, bytes held there, time, and its regions. So many are made that a class shows."""


class Nesting:
    """Finds what to put into regions.

    Args:
        index: of the trace.
        found: candidates, from which what keeps nothing is taken.
        paths: those as edges.
    """

    def __init__(self, index: TraceIndex, found: Sequence[Candidate], paths: Paths) -> None:
        self._index, self._levels = index, Levels(index)
        self._layer_of_slot, self._made = _layers_of_slots(index, paths.starts_of_layers), ~index.resident
        spans = zip(paths.start.tolist(), paths.end.tolist(), strict=True)
        placed = zip(spans, (found[i] for i in paths.candidate.tolist()), strict=True)
        self._outer = [(span, candidate) for span, candidate in placed if not candidate.kept and candidate.first_saved is None]
        self._edges: dict[int, list[_Edge]] = {}
        for span, candidate in self._outer:
            self._add(span, candidate)
        self._alone = [self._left_alone(layer) for layer in range(paths.nodes - 1)]

    def candidates(self, until: float) -> Iterator[Candidate]:
        """Those that peak lower than the same region with nothing inside, the shorter regions first, as long as there is time."""
        work = 0
        for (start, stop), candidate in sorted(self._outer, key=lambda entry: (entry[0][1] - entry[0][0], entry[0])):
            if not self._may_hold_others(candidate):
                continue
            starting = (edge for layer in range(start, stop) for edge in self._edges.get(layer, ()))
            edges = [edge for edge in starting if edge.stop <= stop and edge.is_inside(candidate)]
            work += len(edges)
            if work > _MOST_WORK or time.monotonic() > until:
                return
            for nested in self._read(candidate, self._ways(start, stop, edges, candidate)):
                self._add((start, stop), nested)
                yield nested

    def _may_hold_others(self, candidate: Candidate) -> bool:
        """Modules with others inside and runs of them, in large models runs of 2, 4, 8, …; in very small ones runs of layers as well."""
        count, members = self._index.module_calls, len(candidate.paths)
        if all(map(self._index.is_leaf, candidate.replays[0].calls)):
            return count <= _FEW_CALLS and members > 2
        return count <= _MANY_CALLS or members & (members - 1) == 0

    def _add(self, span: tuple[int, int], candidate: Candidate) -> None:
        self._edges.setdefault(span[0], []).append(self._edge(span, candidate))

    def _edge(self, span: tuple[int, int], candidate: Candidate) -> _Edge:
        start, stop = span
        slots = [slot for layer in range(start, stop) for slot in self._layer_of_slot.get(layer, ())]
        saved = {int(self._index.slot_storage[slot]) for slot in slots if slot not in candidate.dropped}
        held = {storage for storage, _ in candidate.held}
        names = tuple(frozenset((path, *ancestors(path))) for path in candidate.paths)
        return _Edge(start, stop, candidate.region, self._new(saved | held), self._levels.of(candidate.replays), candidate.seconds, names)

    def _left_alone(self, layer: int) -> _Edge:
        slots = ints(self._layer_of_slot.get(layer, ()))
        used = self._index.used[slots]
        begin = int(used[used != NEVER].min(initial=self._index.op_count))
        level = self._levels.by_nature(begin, int(self._index.released[slots].max(initial=0)))
        return _Edge(layer, layer + 1, None, self._new(set(self._index.slot_storage[slots].tolist())), level, 0.0)

    def _new(self, storages: set[int]) -> frozenset[int]:
        return frozenset(storage for storage in storages if self._made[storage])

    def _ways(self, start: int, stop: int, edges: Sequence[_Edge], around: Candidate) -> list[_Label]:
        """The best ways through the layers of a region, the lowest first."""
        there = {storage for storage, _ in around.held}
        into: dict[int, list[tuple[_Edge, int]]] = {}
        for edge in (*edges, *self._alone[start:stop]):
            into.setdefault(edge.stop, []).append((edge, int(self._index.bytes[ints(edge.held - there)].sum())))
        labels: dict[int, list[_Label]] = {start: [(0, 0, 0.0, ())]}
        for node in range(start + 1, stop + 1):
            labels[node] = _undominated([_longer(label, edge, held) for edge, held in into[node] for label in labels[edge.start]])
        return labels[stop]

    def _read(self, around: Candidate, ways: Sequence[_Label]) -> list[Candidate]:
        """As candidates, those of the lowest levels that are worth it."""
        level = self._levels.of(around.replays) * _WORTH
        found: list[tuple[int, Candidate]] = []
        for regions in [regions for *_, regions in ways if regions][:_MOST_READ]:
            with suppress(PlanError):
                candidate = nested_candidate(self._index, around.paths, regions)
                found.append((self._levels.of(candidate.replays), candidate))
        lowest = sorted((entry for entry in found if entry[0] < level), key=lambda entry: (entry[0], entry[1].seconds))
        best: list[Candidate] = []
        for _, candidate in lowest:
            if not best or candidate.seconds < best[-1].seconds:
                best.append(candidate)
        return best[:_MOST_OPTIONS]


def nested_candidate(index: TraceIndex, paths: tuple[str, ...], inside: tuple[PlannedRegion, ...]) -> Candidate:
    """A region with others inside.

    Raises:
        PlanError: they are not inside, or overlap.
    """
    trees = trees_of(index, PlannedRegion(paths, inside=inside))
    replays = sorted((replay for tree in trees for replay in tree), key=lambda r: (r.before, r.first_slot))
    return Candidate(paths, (), tuple(replays), inside)


def _layers_of_slots(index: TraceIndex, starts: Ints) -> dict[int, list[int]]:
    """The saved tensors of each layer: of those saved between two layers, the one before."""
    found: dict[int, list[int]] = {}
    layers = np.searchsorted(starts, index.position, side="right") - 1
    for slot, layer in enumerate(layers.tolist()):
        found.setdefault(max(layer, 0), []).append(slot)
    return found


def _longer(label: _Label, edge: _Edge, held: int) -> _Label:
    level, before, seconds, regions = label
    held += before
    reached = held + edge.level
    return reached if reached > level else level, held, seconds + edge.seconds, regions if edge.region is None else (*regions, edge.region)


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Labels of which none is better in all three, the lowest first; of many, the lowest."""
    kept: list[_Label] = []
    for label in sorted(labels, key=itemgetter(0, 1, 2)):
        _, held, seconds, _ = label
        for _, less, sooner, _ in kept:
            if less <= held and sooner <= seconds:
                break
        else:
            kept.append(label)
            if len(kept) == _MOST_LABELS:
                break
    return kept
