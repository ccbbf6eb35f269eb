"""Stretches of forward, and what to save of each: minimum cuts in which both saving and replaying have a price.

PyTorch's partitioner finds the smallest set of values that spares backward all replays but the cheap ones. Here a byte has a price, and the
cut weighs it against the seconds of the replays that it saves (the Lagrangian of the smallest time within a number of bytes); raising the
price leads from saving what is fastest to saving the least. A stretch lies between two places of forward where little is alive. What goes
from one to the next is saved, so that each replays by itself: that is what keeps the peak of backward low.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.compiled._joint import Joint
from lowtide.compiled._min_cut import Network

_LONGEST = 4
"""Stretches that are replayed as one, at most."""
_MOST_PLACES = 40
_HIGHEST_PRICE = 1e-7
"""Seconds for a byte: at more, nothing else would be saved."""
_LEAST_PRICE = 1e-15
"""Of what takes equally long, what is smaller is saved."""
_UNLIKE = 0.02
_DEPTH = 3
"""How often a range of cuts is divided."""


@dataclass(frozen=True)
class Option:
    """One way to treat a stretch.

    Attributes:
        first, last: it goes from one place to another, by number.
        saved: of its nodes, those that forward saves.
    """

    first: int
    last: int
    saved: frozenset[int]


@dataclass(frozen=True)
class _Cut:
    saved: frozenset[int]
    seconds: float
    bytes: int


class Stretches:
    """The stretches of a graph.

    Attributes:
        places: how many there are between them, the ends included.
    """

    def __init__(self, joint: Joint, save_s: list[float]) -> None:
        """Find the places.

        Args:
            joint: the graph.
            save_s: what it takes to write each value that is not written anyway.
        """
        self._joint, self._save_s = joint, save_s
        self._at = _positions(joint)
        self._bounds = _places(joint, self._at)
        self._free = _constants(joint)
        self.places = len(self._bounds)
        self._known: dict[object, list[frozenset[int]]] = {}

    def options(self) -> list[Option]:
        """All that are worth a look, those of single stretches first."""
        found = []
        for length in range(1, min(_LONGEST, self.places - 1) + 1):
            for first in range(self.places - length):
                found += [Option(first, first + length, saved) for saved in self._cuts(first, first + length)]
        return found

    def nodes(self, first: int, last: int) -> list[int]:
        """The nodes between two places."""
        low, high = self._bounds[first], self._bounds[last]
        return [i for i, at in self._at.items() if low <= at < high]

    def whole(self) -> list[frozenset[int]]:
        """What to save of the whole graph, replayed as one, from the fastest to the smallest."""
        return self._cuts(0, self.places - 1)

    def _cuts(self, first: int, last: int) -> list[frozenset[int]]:
        nodes = self.nodes(first, last)
        forced, wanted = self._wanted(nodes, self._bounds[last])
        # Blocks that are alike are solved once.
        relative = {i: k for k, i in enumerate(nodes)}
        key = tuple(
            (
                self._joint.bytes[i],
                self._joint.size(i),
                round(self._joint.seconds[i], 9),
                i in forced,
                i in wanted,
                self._joint.replayable[i],
                self._joint.savable[i],
                tuple(relative.get(j, -1) for j in self._joint.inputs[i]),
            )
            for i in nodes
        )
        if key not in self._known:
            cuts = self._between(nodes, forced, wanted)
            self._known[key] = [frozenset(relative[i] for i in cut) for cut in cuts]
        return [frozenset(nodes[k] for k in cut) for cut in self._known[key]]

    def _wanted(self, nodes: list[int], end: int) -> tuple[set[int], set[int]]:
        """What later stretches read, which is saved, and what backward reads."""
        joint, inside = self._joint, set(nodes)
        forced, wanted = set[int](), inside & set(joint.needed)
        for i in nodes:
            leaves = any(self._at.get(u, -1) >= end for u in joint.users[i] if joint.is_forward[u] or u in self._at)
            if not leaves or i in self._free:
                continue
            wanted.add(i)
            forced.add(joint.root[i] if joint.root[i] in inside else i)
        return {i for i in forced if joint.savable[i]}, wanted

    def _between(self, nodes: list[int], forced: set[int], wanted: set[int]) -> list[frozenset[int]]:
        """The corners of the convex hull of seconds and bytes.

        At the price at which two cuts cost the same, the cheapest is one of them, or another below the line between them.
        """
        quickest, smallest = (self._cut(nodes, forced, wanted, price) for price in (0.0, _HIGHEST_PRICE))
        found = dict.fromkeys([quickest, smallest])

        def between(quick: _Cut, small: _Cut, depth: int) -> None:
            if not depth or quick.bytes <= small.bytes:
                return
            price = (small.seconds - quick.seconds) / (quick.bytes - small.bytes)
            middle = self._cut(nodes, forced, wanted, max(price, 0.0))
            if middle not in found:
                found[middle] = None
                between(quick, middle, depth - 1)
                between(middle, small, depth - 1)

        between(quickest, smallest, _DEPTH)
        return [cut.saved for cut in sorted(found, key=lambda cut: cut.seconds)]

    def _cut(self, nodes: list[int], forced: set[int], wanted: set[int], price: float) -> _Cut:
        """The cheapest cut between what is at hand and what backward needs.

        Each node of the graph is two of the network: that it runs again, and that its value is there. To cut between the two is to save it,
        to cut before the first is to run it.
        """
        joint = self._joint
        run = {i: 2 + 2 * k for k, i in enumerate(nodes)}
        # Ops that are alike cost a little more the later they are, or a line between two cuts would have others on it that are never found.
        again = {i: joint.seconds[i] * (1 + _UNLIKE * k / len(nodes)) for k, i in enumerate(nodes)}
        # A view holds all of its storage; the base is as good.
        size = {i: joint.size(joint.root[i]) + (joint.root[i] != i) for i in nodes}
        network = Network(2 + 2 * len(nodes))
        for i in nodes:
            there = run[i] + 1
            network.edge(run[i], there, (price + _LEAST_PRICE) * size[i] + self._save_s[i] if joint.savable[i] else np.inf)
            network.edge(0, run[i], again[i] if joint.replayable[i] and i not in forced else np.inf)
            if i in wanted or i in forced:
                network.edge(there, 1)
            for u in joint.users[i]:
                if u in run:
                    network.edge(there, run[u])
        side = network.source_side()
        saved = frozenset(i for i in nodes if side[run[i]] and not side[run[i] + 1])
        seconds = sum(again[i] for i in nodes if not side[run[i]]) + sum(self._save_s[i] for i in saved)
        return _Cut(saved, seconds, sum(size[i] for i in saved))


def _positions(joint: Joint) -> dict[int, int]:
    """A place in forward for every node that forward can make."""
    at: dict[int, int] = {}
    count = 0
    for i, node in enumerate(joint.nodes):
        if node.op == "placeholder" or joint.is_gradient[i]:
            continue
        if joint.is_forward[i]:
            at[i] = count
            count += 1
        elif all(j in at or joint.nodes[j].op == "placeholder" for j in joint.inputs[i]):
            at[i] = max((at[j] for j in joint.inputs[i] if j in at), default=0)
    return at


def _constants(joint: Joint) -> set[int]:
    """What is made of nothing: to make it again anywhere is cheap."""
    found = set[int]()
    for i, node in enumerate(joint.nodes):
        if node.op != "placeholder" and joint.replayable[i] and found.issuperset(joint.inputs[i]):
            found.add(i)
    return found


def _places(joint: Joint, at: dict[int, int]) -> list[int]:
    """Positions where less is alive than around them, the ends included.

    What forward returns or writes to its inputs at its end, such as running statistics, is left out: it only adds up.
    """
    order = [i for i in at if joint.is_forward[i]]
    writes = {i for i in order if joint.is_write[i]}
    stays = {joint.root[i] for i in joint.forward_outputs}.union(joint.root[j] for i in writes for j in joint.inputs[i])
    last = {joint.root[i]: at[i] for i in order}
    for i in order:
        for j in joint.inputs[i]:
            last[joint.root[j]] = max(last.get(joint.root[j], -1), at[i])
    alive = np.zeros(len(order) + 2, dtype=np.int64)
    for i in order:
        if joint.root[i] in stays:
            continue
        alive[at[i] + 1] += joint.bytes[i]
        alive[last[i] + 1 if joint.root[i] == i else at[i] + 1] -= joint.bytes[i]
    alive = np.cumsum(alive)
    dear = [at[i] for i in order if not joint.fusible[i] and joint.seconds[i] > 0 and i not in writes]
    between = [high - int(np.argmin(alive[low + 1 : high + 1][::-1])) for low, high in pairwise(dear)]
    minima = [b for k, b in enumerate(between) if all(alive[b] <= alive[c] for c in between[max(k - 1, 0) : k + 2])]
    while len(minima) > _MOST_PLACES:
        minima = minima[::2]
    return [0, *sorted(set(minima)), len(order)]
