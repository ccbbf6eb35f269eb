"""A choice of regions as a path: from the first layer of the step to the last, each edge a region or one layer left as it is.

This holds where regions are intervals of layers that exclude each other just when they overlap: chains and branches in the order
in which they run, whatever their long skips keep alive. It does not hold for modules that run in several places with regions around
each of them; such models are left to a general solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.plan._conflicts import Conflicts, Key
from lowtide.plan._index import Floats, Ints, TraceIndex, ints


@dataclass(frozen=True)
class Paths:
    """Nodes in order; edges from ``start`` to ``end``, sorted by end. Those of no region, to the next node, are not listed.

    Attributes:
        candidate, start, end: by edge.
        nodes: one more than there are layers.
        starts_of_layers: ops at which layers are first called.
    """

    candidate: Ints
    start: Ints
    end: Ints
    nodes: int
    starts_of_layers: Ints

    @cached_property
    def into(self) -> Ints:
        """Edges ``into[p]`` up to ``into[p + 1]`` end in node p."""
        return np.searchsorted(self.end, np.arange(self.nodes + 1)).astype(np.int64)

    def cheapest(self, cost: Floats) -> tuple[float, list[int]]:
        """The path of least cost, as its edges."""
        least, by = self._least(cost)
        edges: list[int] = []
        node = self.nodes - 1
        while node:
            edge = int(by[node])
            edges += [edge] if edge >= 0 else []
            node = int(self.start[edge]) if edge >= 0 else node - 1
        return float(least[-1]), edges[::-1]

    def _least(self, cost: Floats) -> tuple[Floats, Ints]:
        least, by = np.zeros(self.nodes), np.full(self.nodes, -1, dtype=np.int64)
        bounds = self.into.tolist()
        for node in range(1, self.nodes):
            low, high = bounds[node], bounds[node + 1]
            least[node] = least[node - 1]
            if low < high:
                reached = least[self.start[low:high]] + cost[low:high]
                best = int(reached.argmin())
                if reached[best] < least[node]:
                    least[node], by[node] = reached[best], low + best
        return least, by

    def least_to_go(self, cost: Floats) -> Floats:
        """From each node, the least cost to the last one: ``(nodes,)``, or ``(nodes, n)`` for n costs of each edge."""
        least = np.zeros((self.nodes, *cost.shape[1:]))
        order = np.argsort(self.start, kind="stable")
        bounds = np.searchsorted(self.start[order], np.arange(self.nodes + 1)).tolist()
        for node in range(self.nodes - 2, -1, -1):
            out = order[bounds[node] : bounds[node + 1]]
            least[node] = least[node + 1]
            if len(out):
                np.minimum(least[node], (least[self.end[out]] + cost[out]).min(axis=0), out=least[node, ...])
        return least


def as_paths(index: TraceIndex, conflicts: Conflicts) -> Paths | None:
    """The candidates as edges; ``None`` where they are no intervals, or exclude each other otherwise than by overlapping."""
    place = _places(index, list(conflicts.around))
    spans = [_span(place, keys) for keys in conflicts.keys]
    if any(span is None for span in spans):
        return None
    starts, ends = (ints(side) for side in zip(*(s for s in spans if s is not None), strict=True)) if spans else (ints(()), ints(()))
    if not _overlap_is_conflict(conflicts, place, starts, ends):
        return None
    order = np.lexsort((starts, ends))
    return Paths(order.astype(np.int64), starts[order], ends[order], max(place.values(), default=-1) + 2, _starts(index, place))


def _places(index: TraceIndex, keys: Sequence[Key]) -> dict[Key, int]:
    """Calls and paths to the layer that they stand for: leaf modules in the order in which they are first called."""
    first = {key: index.calls_of_path[_path(index, key)][0] for key in keys}
    rank = {call: i for i, call in enumerate(sorted(set(first.values())))}
    return {key: rank[call] for key, call in first.items()}


def _starts(index: TraceIndex, place: dict[Key, int]) -> Ints:
    first = {layer: index.calls_of_path[_path(index, key)][0] for key, layer in place.items()}
    return index.start[ints(first[layer] for layer in range(len(first)))]


def _path(index: TraceIndex, key: Key) -> str:
    return key if isinstance(key, str) else index.trace.calls[key].path


def _span(place: dict[Key, int], keys: frozenset[Key]) -> tuple[int, int] | None:
    layers = {place[key] for key in keys}
    low, high = min(layers), max(layers) + 1
    return (low, high) if high - low == len(layers) else None


def _overlap_is_conflict(conflicts: Conflicts, place: dict[Key, int], starts: Ints, ends: Ints) -> bool:
    """Whether candidates around one layer all have a key in common. (Those with a key in common have its layer in common.)"""
    around: dict[int, set[int]] = {}
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        for layer in range(start, end):
            around.setdefault(layer, set()).add(i)
    groups: dict[int, list[set[int]]] = {}
    for key, layer in place.items():
        groups.setdefault(layer, []).append(conflicts.around[key])
    return all(any(inside <= group for group in groups[layer]) for layer, inside in around.items())
