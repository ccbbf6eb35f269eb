"""What is worth choosing in a block, for all blocks that are like it.

Of very many blocks only the best options are given: those on the convex hull of bytes freed against seconds, which are found as the
cheapest ways through the block at one price of a byte after another. Which mixture of them is best is then up to the solver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from lowtide.errors import PlanError
from lowtide.plan._candidate import Candidate
from lowtide.plan._conflicts import Conflicts
from lowtide.plan._equal import EqualBlocks
from lowtide.plan._index import Floats, TraceIndex
from lowtide.plan._nested import nested_candidate
from lowtide.plan._path import as_paths
from lowtide.plan._replay import replays_of
from lowtide.plan._solution import PlannedRegion

_MOST = 8000
_PRICES = 24


def copies(index: TraceIndex, equal: EqualBlocks, kept: Sequence[Candidate]) -> Iterator[Candidate]:
    """For each block that is like another one, the candidates inside that one.

    Args:
        index: of the trace.
        equal: which blocks are alike.
        kept: candidates of all that is not a copy.
    """
    originals = {original: _inside(index, original, kept) for original in set(equal.original.values())}
    if sum(len(originals[original]) for original in equal.original.values()) > _MOST:
        originals = {original: _best(index, found) for original, found in originals.items()}
    for call, original in equal.original.items():
        for candidate in originals[original]:
            with suppress(PlanError):  # alike in what it runs, but not in what it is called
                yield from _renamed(index, candidate, index.trace.calls[original].path, index.trace.calls[call].path)


def _inside(index: TraceIndex, call: int, kept: Sequence[Candidate]) -> list[Candidate]:
    stop = int(index.call_stop[call])
    return [c for c in kept if all(call <= inner < stop for replay in c.replays for inner in replay.calls)]


def _renamed(index: TraceIndex, candidate: Candidate, old: str, new: str) -> Iterator[Candidate]:
    paths = tuple(new + path.removeprefix(old) for path in candidate.paths)
    if candidate.inside:
        yield nested_candidate(index, paths, tuple(_renamed_region(region, old, new) for region in candidate.inside))
        return
    kept = tuple(replace(call, module=new + call.module.removeprefix(old)) for call in candidate.kept)
    replays = replays_of(index, paths, kept, candidate.first_saved)
    found = Candidate(paths, kept, tuple(replays), first_saved=candidate.first_saved)
    if found.dropped:
        yield found


def _renamed_region(region: PlannedRegion, old: str, new: str) -> PlannedRegion:
    paths = tuple(new + path.removeprefix(old) for path in region.paths)
    return PlannedRegion(paths, inside=tuple(_renamed_region(inner, old, new) for inner in region.inside))


def _best(index: TraceIndex, found: Sequence[Candidate]) -> list[Candidate]:
    paths = as_paths(index, Conflicts(found)) if found else None
    if paths is None:
        return list(found)
    seconds, freed = (
        np.array(column, dtype=np.float64)[paths.candidate] for column in zip(*((c.seconds, c.freed_bytes) for c in found), strict=True)
    )
    used = {edge for price in _prices(seconds, freed) for edge in paths.cheapest(seconds - price * freed)[1]}
    return [found[int(paths.candidate[edge])] for edge in sorted(used)]


def _prices(seconds: Floats, freed: Floats) -> Floats:
    """Seconds a byte, from where the first option is worth it to where all are."""
    rates = seconds[freed > 0] / freed[freed > 0]
    return np.geomspace(max(rates.min(initial=1.0), 1e-15) / 2, max(rates.max(initial=1.0), 1e-15) * 4, _PRICES)
