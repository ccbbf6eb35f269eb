"""The bytes alive while a compiled graph runs forward and backward, for any set of values that forward saves.

The compiler makes one loop of neighbouring elementwise ops, and what is only passed on inside a loop is never in memory: such values
count nothing, and what they were made of is read where the loop is. How it orders backward is modelled on PyTorch's own partitioner:
a replayed op runs right before the first op that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.compiled._joint import Joint

Bytes = NDArray[np.int64]

_READS_IN_A_LOOP = 4
"""A value with several readers that is made of more than this many others is written to memory (inductor's ``realize_reads_threshold``)."""


@dataclass(frozen=True)
class Timeline:
    """What one set of saved values leads to.

    Attributes:
        saved: what forward hands over, by number.
        saved_bytes: of those, without parameters.
        forward, backward: the most bytes alive at each node of forward, and at each of backward that depends on gradients.
        seconds: what it takes to run again in backward what forward ran already, and to write what is saved and would else be in no memory.
        possible: nothing has to run again that cannot.
    """

    saved: frozenset[int]
    saved_bytes: int
    forward: Bytes
    backward: Bytes
    seconds: float
    possible: bool = True

    @property
    def levels(self) -> Bytes:
        """All moments."""
        return np.concatenate([self.forward, self.backward])

    @property
    def peak_bytes(self) -> int:
        """The most at any moment."""
        return int(self.levels.max(initial=0))


class Timelines:
    """Makes the timelines of one graph."""

    def __init__(self, joint: Joint, save_s: list[float]) -> None:
        """Find what is the same in all of them.

        Args:
            joint: the graph.
            save_s: what it takes to write each value that is not written anyway.
        """
        self._joint, self._save_s = joint, save_s
        self._gradients = [i for i, gradient in enumerate(joint.is_gradient) if gradient and joint.nodes[i].op != "placeholder"]
        self._forward = [i for i, forward in enumerate(joint.is_forward) if forward and joint.nodes[i].op != "placeholder"]
        self._tangents = [i for i, gradient in enumerate(joint.is_gradient) if gradient and joint.nodes[i].op == "placeholder"]

    def of(self, wanted: Iterable[int]) -> Timeline:
        """The timeline when forward saves what backward needs of ``wanted``, and what cannot run again."""
        joint = self._joint
        saved, replayed = self._split(set(wanted))
        forward = self._needed_by(self._forward, saved)
        backward, moments = self._in_order(replayed)
        kept = {joint.root[i] for i in saved}
        held = kept | {joint.root[i] for i in joint.forward_outputs}
        first = _phase(joint, forward, set(), held)
        second = _phase(joint, backward, kept | set(self._tangents), {joint.root[i] for i in joint.backward_outputs})
        again = set(forward)
        return Timeline(
            frozenset(saved),
            sum(joint.bytes[i] for i in kept),
            _highest(first, self._moments_of_forward(forward), len(self._forward)),
            _highest(second, moments, len(self._gradients)),
            sum(joint.seconds[i] for i in replayed if i in again) + sum(self._save_s[i] for i in saved),
            all(joint.replayable[i] for i in replayed),
        )

    def _split(self, wanted: set[int]) -> tuple[set[int], set[int]]:
        """What is saved, and what runs again, so that all is there that backward needs."""
        joint, saved, replayed = self._joint, set[int](), set[int]()
        stack = list(joint.needed)
        while stack:
            i = stack.pop()
            if i in saved or i in replayed:
                continue
            if (i in wanted or not joint.replayable[i]) and joint.savable[i]:
                saved.add(i)
                continue
            replayed.add(i)
            stack += joint.inputs[i]
        return saved, replayed

    def _needed_by(self, forward: list[int], saved: set[int]) -> list[int]:
        joint, found = self._joint, set(forward)
        stack = [i for i in saved if i not in found]
        while stack:
            i = stack.pop()
            if i not in found and joint.nodes[i].op != "placeholder":
                found.add(i)
                stack += joint.inputs[i]
        return sorted(found)

    def _moments_of_forward(self, order: list[int]) -> list[int]:
        moments, moment, known = [], -1, set(self._forward)
        for i in order:
            moment += i in known
            moments.append(max(moment, 0))
        return moments

    def _in_order(self, replayed: set[int]) -> tuple[list[int], list[int]]:
        """Backward's nodes in order, and before which of those that depend on gradients each is."""
        joint, order, moments = self._joint, list[int](), list[int]()
        waiting = {i for i in replayed if joint.nodes[i].op != "placeholder"}
        for moment, gradient in enumerate(self._gradients):
            found, stack = [gradient], list(joint.inputs[gradient])
            while stack:
                i = stack.pop()
                if i in waiting:
                    waiting.discard(i)
                    found.append(i)
                    stack += joint.inputs[i]
            order += sorted(found)
            moments += [moment] * len(found)
        return order, moments


def _highest(levels: Bytes, moments: list[int], count: int) -> Bytes:
    highest = np.zeros(max(count, 1), dtype=np.int64)
    if len(levels):
        np.maximum.at(highest, np.asarray(moments), levels)
    return highest


def _phase(joint: Joint, order: list[int], there: set[int], held: set[int]) -> Bytes:
    """Bytes alive at each node of a phase.

    Args:
        joint: the graph.
        order: the phase's nodes as they run.
        there: storages that are alive when it begins.
        held: storages that stay alive when it ends.
    """
    place = {i: at for at, i in enumerate(order)}
    written = _written(joint, order, place, held)
    runs_at = _read_at(joint, order, place, written)
    last: dict[int, int] = {}
    for i in order:
        for j in joint.inputs[i]:
            root = joint.root[j]
            last[root] = max(last.get(root, -1), runs_at[i])
    change = np.zeros(len(order) + 2, dtype=np.int64)
    for root in there:
        if joint.bytes[root]:
            change[0] += joint.bytes[root]
            change[len(order) if root in held else last.get(root, -1) + 1] -= joint.bytes[root]
    taken: set[int] = set()
    for at, i in enumerate(order):
        if i not in written or not joint.bytes[i]:
            continue
        change[at] += joint.bytes[i]
        end = len(order) if i in held else max(last.get(i, at), at) + 1
        change[end] -= joint.bytes[i]
        given_up = _taken_over(joint, i, at, last, there | held, taken)
        if given_up is not None:  # its memory is the result's from here on
            taken.add(given_up)
            change[at] -= joint.bytes[i]
            change[at + 1] += joint.bytes[i]
    return np.cumsum(change)[: len(order)]


def _taken_over(joint: Joint, i: int, at: int, last: dict[int, int], not_ours: set[int], taken: set[int]) -> int | None:
    """An input of an elementwise op that is read for the last time, whose memory the result takes over."""
    if not joint.fusible[i] or joint.is_reduction[i]:
        return None
    roots = (joint.root[j] for j in joint.inputs[i])
    fit = (r for r in roots if last.get(r) == at and joint.bytes[r] == joint.bytes[i] and r not in not_ours and r not in taken)
    return next(fit, None)


def _written(joint: Joint, order: list[int], place: dict[int, int], held: set[int]) -> set[int]:
    """The values that are in memory: those that are not only passed on inside a loop."""
    written, reads = set[int](), dict[int, int]()
    for i in order:
        if not joint.fusible[i] or joint.is_reduction[i] or i in held:
            written.add(i)
            continue
        users = [u for u in joint.users[i] if u in place]
        reads[i] = sum(1 if j in written else reads.get(j, 1) for j in joint.inputs[i])
        many = len(users) > 1 and reads[i] > _READS_IN_A_LOOP
        if many or not all(joint.fusible[u] for u in users):
            written.add(i)
    return written


def _read_at(joint: Joint, order: list[int], place: dict[int, int], written: set[int]) -> dict[int, int]:
    """Where each node reads its inputs: where it runs, or, inside a loop, where the loop runs."""
    runs_at: dict[int, int] = {}
    for i in reversed(order):
        inside = () if i in written else (runs_at[u] for u in joint.users[i] if u in runs_at)
        runs_at[i] = max([place[i], *inside])
    return runs_at
