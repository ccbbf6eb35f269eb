"""What autograd saved: by module, node and dtype; which storages are shared; what is saved twice in another dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowtide.explain._step import StepView, dtype_of, node_of, path_name
from lowtide.records import Category, Op, Phase, StepTrace

_CASTS = ("aten._to_copy", "aten.to.")


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Saved tensors of one module, backward node and dtype.

    Attributes:
        path: the innermost module in which they were saved.
        node: the backward node that holds them.
        dtype: of the tensors; empty where the trace does not say.
        tensors: how many.
        bytes: of the tensors, each view counted with its own size.
        storage_bytes: of their storages that no earlier row keeps already; parameters and inputs, which are there anyway, left out.
    """

    path: str
    node: str
    dtype: str
    tensors: int
    bytes: int
    storage_bytes: int


@dataclass(frozen=True, slots=True)
class SharedStorage:
    """One storage that several saved tensors keep: to free it, all of them have to be dropped.

    Attributes:
        storage: index in the trace.
        bytes: of the storage.
        path: the module that made it.
        savers: module and node of each saved tensor, in order.
    """

    storage: int
    bytes: int
    path: str
    savers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SavedTwice:
    """A tensor that is kept a second time in another dtype.

    Attributes:
        original, copy: storages.
        original_bytes, copy_bytes: their sizes.
        dtypes: of original and copy; empty texts where the trace does not say.
        path, source: module and line of the cast.
        of_parameter: the original is a parameter, which is there anyway: the copy alone could go.
    """

    original: int
    copy: int
    original_bytes: int
    copy_bytes: int
    dtypes: tuple[str, str]
    path: str
    source: str
    of_parameter: bool


@dataclass(frozen=True, slots=True)
class SavedTable:
    """Everything that autograd saved in one step.

    Attributes:
        rows: most bytes first.
        shared: storages with several savers, the largest first; those that were there before the step left out.
        twice: what is kept in two dtypes, the largest copy first.
        tensors: how many tensors were saved.
        storage_bytes: of all storages that are kept for backward alone or first of all, each once.
    """

    rows: tuple[SavedRow, ...]
    shared: tuple[SharedStorage, ...]
    twice: tuple[SavedTwice, ...]
    tensors: int
    storage_bytes: int


def saved_table(trace: StepTrace) -> SavedTable:
    """Tabulate what autograd saved.

    Args:
        trace: of the step.
    """
    view = StepView(trace)
    rows = tuple(sorted(_rows(view), key=lambda row: (-row.storage_bytes, -row.bytes, row.path, row.node)))
    twice = tuple(sorted(_twice(view), key=lambda pair: -pair.copy_bytes))
    return SavedTable(rows, _shared(view), twice, len(trace.saved), sum(row.storage_bytes for row in rows))


def _rows(view: StepView) -> Iterator[SavedRow]:
    groups: dict[tuple[str, str, str], list[int]] = {}
    for slot, tensor in enumerate(view.trace.saved):
        key = path_name(view.path_of_call(tensor.call)), node_of(tensor), dtype_of(tensor)
        groups.setdefault(key, []).append(slot)
    first = {slots[0] for slots in view.slots_of_storage.values()}
    for (path, node, dtype), slots in groups.items():
        tensors = [view.trace.saved[slot] for slot in slots]
        new = (view.trace.storages[view.trace.saved[slot].storage] for slot in slots if slot in first)
        kept = sum(storage.bytes for storage in new if not storage.resident)
        yield SavedRow(path, node, dtype, len(tensors), sum(t.bytes for t in tensors), kept)


def _shared(view: StepView) -> tuple[SharedStorage, ...]:
    found = []
    for storage, slots in view.slots_of_storage.items():
        record = view.trace.storages[storage]
        if len(slots) > 1 and not record.resident and record.bytes:
            savers = tuple((path_name(view.path_of_call(view.trace.saved[s].call)), node_of(view.trace.saved[s])) for s in slots)
            found.append(SharedStorage(storage, record.bytes, path_name(view.owner(storage)), savers))
    return tuple(sorted(found, key=lambda shared: -shared.bytes))


def _twice(view: StepView) -> Iterator[SavedTwice]:
    """Casts whose result is saved, of something that is saved as well or is a parameter."""
    for i, op in enumerate(view.trace.ops):
        if op.phase is Phase.FORWARD and op.name.startswith(_CASTS) and op.reads:
            yield from _pairs(view, i, op)


def _pairs(view: StepView, index: int, op: Op) -> Iterator[SavedTwice]:
    original = op.reads[0]
    record = view.trace.storages[original]
    of_parameter = record.category is Category.PARAMETER
    if not (of_parameter or original in view.slots_of_storage):
        return
    for copy in view.born_at.get(index, []):
        dtypes = _dtype_saved(view, original), _dtype_saved(view, copy)
        size = view.trace.storages[copy].bytes
        if copy in view.slots_of_storage and _differ(dtypes, record.bytes, size):
            yield SavedTwice(original, copy, record.bytes, size, dtypes, path_name(view.path_of_op(index)), op.source, of_parameter)


def _dtype_saved(view: StepView, storage: int) -> str:
    return next((dtype_of(view.trace.saved[slot]) for slot in view.slots_of_storage.get(storage, [])), "")


def _differ(dtypes: tuple[str, str], original_bytes: int, copy_bytes: int) -> bool:
    """By dtype where both are known; else by size, which a cast to another width changes."""
    return dtypes[0] != dtypes[1] if all(dtypes) else original_bytes != copy_bytes
