"""Regions with regions inside: what becomes of what those hold.

A region hands its inputs to the hooks of the region around it, as autograd hands it the tensors that are saved. The replay around
makes them again, and ends as soon as the last of them is back: what is saved inside is left to the region inside, whose replay follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from lowtide.errors import PlanError
from lowtide.plan._index import Flags, Ints, TraceIndex
from lowtide.plan._replay import Replay, member_ops_of, name_of, read, replayable, replays_of
from lowtide.plan._solution import PlannedRegion


@dataclass(frozen=True)
class _Node:
    """One occurrence of a region, with those inside it."""

    region: PlannedRegion
    calls: tuple[int, ...]
    inside: tuple[_Node, ...]


def trees_of(index: TraceIndex, region: PlannedRegion) -> list[list[Replay]]:
    """Every occurrence of a region with those of the regions inside it: the outermost first, then what is inside.

    What the outermost one makes is not held by those inside: their inputs are handed to it, and made again by its replay.

    Raises:
        PlanError: as of ``replays_of``, or regions inside that overlap.
    """
    if not region.inside:
        return [[replay] for replay in replays_of(index, region.paths, region.kept, region.first_saved)]
    return [_tree(index, node) for node in _nodes(index, region)]


def _nodes(index: TraceIndex, region: PlannedRegion) -> list[_Node]:
    found = [node for inner in region.inside for node in _nodes(index, inner)]
    _refuse_overlap(index, [(inner.region.paths, inner.calls) for inner in found])
    nodes = []
    for calls in replayable(index, region.paths):
        within = tuple(node for node in found if _is_inside(index, node.calls, calls))
        nodes.append(_Node(region, calls, within))
        found = [node for node in found if not any(node is other for other in within)]
    return nodes + found


def _is_inside(index: TraceIndex, inner: tuple[int, ...], calls: tuple[int, ...]) -> bool:
    return all(any(c <= call < index.call_stop[c] for c in calls) for call in inner)


def _tree(index: TraceIndex, node: _Node) -> list[Replay]:
    makers = member_ops_of(index, node.calls)
    outer, *inside = _read(index, node, makers, None)
    made = index.storages_born_in(makers)
    return [outer, *(_letting_go(replay, ~index.among_storages(replay.held, made)) for replay in inside)]


def _read(index: TraceIndex, node: _Node, makers: Ints, around: Ints | None) -> list[Replay]:
    within = [_read(index, inner, makers, makers) for inner in node.inside]
    outer = read(index, node.region.paths, node.calls, node.region.kept, [tree[0] for tree in within], around)
    return [outer, *(replay for tree in within for replay in tree)]


def _letting_go(replay: Replay, stays: Flags) -> Replay:
    return replace(replay, held=replay.held[stays], held_until=replay.held_until[stays])


def refuse_overlap(index: TraceIndex, replays: Sequence[Replay]) -> None:
    """Check that no call of one region runs inside another.

    Raises:
        PlanError: one does.
    """
    _refuse_overlap(index, [(replay.region, replay.calls) for replay in replays])


def _refuse_overlap(index: TraceIndex, regions: Sequence[tuple[tuple[str, ...], tuple[int, ...]]]) -> None:
    covered = sorted((call, int(index.call_stop[call]), paths) for paths, calls in regions for call in calls)
    for (_, stop, one), (start, _, other) in pairwise(covered):
        if start < stop:
            raise PlanError(f"regions {name_of(one)} and {name_of(other)} overlap: a call of one runs inside the other; keep one of them")
