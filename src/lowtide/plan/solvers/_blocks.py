"""Which modules are a model's blocks: what rules of thumb are stated over."""

from __future__ import annotations

from lowtide.plan._index import TraceIndex, ints

_MOST_FAMILIES = 3
_FEW, _MANY, _LONG = 30, 8, 200


def most_tried(blocks: int) -> int:
    """How many plans of a kind a rule tries: not every number of very many blocks, each of which takes long to simulate."""
    return _FEW if blocks <= _LONG else _MANY


def families(index: TraceIndex) -> list[list[str]]:
    """Paths of modules of one class, in order of first call: the model's blocks, seen in up to three ways.

    A family has two modules or more, none inside another, all of which save tensors in forward. The families that save the most come first,
    with the smaller modules first where they save the same.
    """
    found = [_outermost(index, paths) for paths in _by_class(index).values()]
    repeated = [paths for paths in found if len(paths) > 1]
    return sorted(repeated, key=lambda paths: (-_saved_bytes(index, paths), -len(paths)))[:_MOST_FAMILIES]


def _by_class(index: TraceIndex) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, calls in index.calls_of_path.items():
        if not index.is_function[calls[0]] and index.replayable[calls].all() and _saved_bytes(index, [path]):
            found.setdefault(index.trace.calls[calls[0]].type, []).append(path)
    return found


def _outermost(index: TraceIndex, paths: list[str]) -> list[str]:
    """Without the modules that are called inside another of them."""
    kept: list[str] = []
    stop = 0
    for call, path in sorted((index.calls_of_path[path][0], path) for path in paths):
        if call >= stop:
            kept.append(path)
            stop = int(index.call_stop[call])
    return kept


def _saved_bytes(index: TraceIndex, paths: list[str]) -> int:
    """Bytes of what is saved in the first call of each, what was there before the step left out."""
    calls = [index.calls_of_path[path][0] for path in paths]
    slots = [s for call in calls for s in index.slots_of_call(call).tolist()]
    storages = ints(sorted({int(index.slot_storage[s]) for s in slots}))
    return int(index.bytes[storages][~index.resident[storages]].sum())
