"""Which modules are a model's blocks: what rules of thumb are stated over."""

from __future__ import annotations

from collections import Counter

from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._replay import replays_of


def blocks(index: TraceIndex) -> list[str]:
    """Paths of the model's blocks in order of first call.

    Blocks are sibling modules of one class, at least two, that save tensors in forward. Of all such families it is the one with the
    most calls inside it and around its saved tensors that counts: the outermost one wherever blocks contain blocks.
    """
    families = [_family(index, siblings) for siblings in index.children.values()]
    return max(families, key=lambda paths: _saved_bytes(index, paths), default=[])


def _family(index: TraceIndex, siblings: list[int]) -> list[str]:
    useful = [c for c in siblings if _drops_something(index, c)]
    kinds = Counter(index.trace.calls[c].type for c in useful)
    repeated = [c for c in useful if kinds[index.trace.calls[c].type] > 1]
    return list(dict.fromkeys(index.trace.calls[c].path for c in repeated))


def _drops_something(index: TraceIndex, call: int) -> bool:
    path = index.trace.calls[call].path
    calls = index.calls_of_path[path]
    return bool(index.replayable[calls].all()) and any(r.before != NEVER for r in replays_of(index, (path,)))


def _saved_bytes(index: TraceIndex, paths: list[str]) -> int:
    storages = {s for path in paths for r in replays_of(index, (path,)) for s in index.slot_storage[r.dropped].tolist()}
    return sum(index.trace.storages[s].bytes for s in storages)
