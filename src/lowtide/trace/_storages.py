"""The table of storages: which allocations a step makes, touches and gives back.

A storage is watched through a weak reference, whose callback runs at the very moment the last tensor on
it dies. The table itself keeps nothing alive.

A tensor that is made of others, such as one spread over processes, says how large the whole is and has no memory: those that it is made of
are entered in its place; so are the indices and the values of a sparse tensor. Some storages are there all the time and hold bytes only
now and then, for a sharding framework fills and empties them: each time that one is full is a row of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from lowtide._torch_private import FakeTensor, is_functorch_wrapped
from lowtide.records import Category, Storage
from lowtide.trace._acceleration import native, records_of
from lowtide.trace._counting import Counting
from lowtide.trace._sparse import parts_of_sparse

_STRIDED = torch.strided
_HAVE_MEMORY = frozenset({torch.Tensor, torch.nn.Parameter})
_UNLESS_RESIDENT = frozenset({Category.ACTIVATION, Category.TEMPORARY})


class StorageTable:
    """Storages by index, in order of first sight.

    Args:
        counting: how bytes are counted; storages on other devices are rows of zero bytes.
        ops: those that have run: their number is the clock.
        stand_in: what is entered in a tensor's place.

    Attributes:
        running: the module calls that are running, the innermost last: index, and first op.
        replaced: call and row of each storage that was there before the call and died while it ran.
        refills: key and row of every storage that was empty at the start and was filled.
        refilled_rows: the rows among them.
    """

    def __init__(self, counting: Counting, ops: list[Any], stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
        """Start an empty table."""
        self._counting, self._clock, self._stand_in = counting, ops.__len__, stand_in
        self.running: list[tuple[int, int]] = []
        self.replaced: list[tuple[int, int]] = []
        # By row. Columns, for to append to five lists takes half the time of making an object.
        self._bytes: list[int] = []
        self._categories: list[Category] = []
        self._born: list[int] = []
        self._freed: list[int | None] = []
        self._resident: list[bool] = []
        # By address of the storage. What a row stands for may change, so that the death of a storage counts only while it does so.
        self._row_of: dict[int, int] = {}
        self._watches: list[weakref.ref[torch.UntypedStorage]] = []
        self._at_start: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._empty_at_start: set[int] = set()
        self._full: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.refills: list[tuple[int, int]] = []
        self.refilled_rows: set[int] = set()
        # Until it is closed it refers to the table, and the table to it.
        self.compiled: Any = None if native is None or stand_in is not None else self._compiled(native, ops)
        if self.compiled is not None:
            self.rows_of = self.compiled.rows_of  # type: ignore[method-assign]

    def _compiled(self, native: ModuleType, ops: list[Any]) -> Any:
        """What does the same as ``rows_of`` and ``_gone``, compiled."""
        return native.Storages(
            row_of=self._row_of,
            sizes=self._bytes,
            categories=self._categories,
            born=self._born,
            freed=self._freed,
            resident=self._resident,
            watches=self._watches,
            at_start=self._at_start,
            empty_at_start=self._empty_at_start,
            running=self.running,
            ops=ops,
            size=None if self._counting.is_of_cpu else self._counting.size,
            entered=self._entered,
            other=self._rows_of_other,
            note_replaced=self._note_replaced,
        )

    def remember_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what is alive before the step, so that it is told from what the step allocates."""
        for tensor in tensors:
            if tensor.layout is not _STRIDED or is_functorch_wrapped(tensor) or is_made_of_others(type(tensor)):
                self.remember_resident(parts_of_sparse(tensor))
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 < tensor.numel():
                self._empty_at_start.add(storage._cdata)
            # The address of one that dies untouched is used again: it must not vouch for its successor.
            gone = partial(self._gone_from_start, storage._cdata, self._counting.size(tensor, storage))
            self._at_start[storage._cdata] = weakref.ref(storage, gone)

    def rows_of(self, tensors: Sequence[torch.Tensor], category: Category) -> tuple[int, ...]:
        """Rows of the storages of several tensors, each once, entered under ``category`` where they are new."""
        rows: list[int] = []
        for tensor in tensors:
            if type(tensor) not in _HAVE_MEMORY or self._stand_in is not None:
                rows += self._rows_of_other(tensor, category)
                continue
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # it has none: a sparse one, or one that a function transform has wrapped
                rows += self._rows_of_other(tensor, category)
                continue
            key = storage._cdata
            row = self._row_of.get(key)
            if row is None or key in self._empty_at_start:
                row = self._entered(tensor, storage, category, row)
            rows.append(row)
        return tuple(rows) if len(rows) < 2 else tuple(dict.fromkeys(rows))

    def _rows_of_other(self, tensor: torch.Tensor, category: Category) -> tuple[int, ...]:
        """The same for one tensor that is of another type, or has a stand-in."""
        if tensor.layout is not _STRIDED or is_functorch_wrapped(tensor):
            return self.rows_of(parts_of_sparse(tensor), category)
        if is_made_of_others(type(tensor)):
            return self.rows_of(_parts(tensor), category)
        counted = tensor if self._stand_in is None else self._stand_in(tensor)
        storage = counted.untyped_storage()
        row = self._row_of.get(storage._cdata)
        if row is None or storage._cdata in self._empty_at_start:
            # What needs a stand-in was made by nothing that was recorded.
            row = self._entered(counted, storage, category, row, stands_in=counted is not tensor)
        return (row,)

    def _entered(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, category: Category, row: int | None, *, stands_in: bool = False
    ) -> int:
        """Row of a storage that is new, or filled and emptied."""
        key = storage._cdata
        if key in self._empty_at_start:
            return self._refilled(tensor, storage, row)
        resident = stands_in or key in self._at_start
        if resident and category in _UNLESS_RESIDENT:
            category = Category.INPUT
        size = self._counting.size(tensor, storage)
        return self._watch(storage, self._add(size, category, 0 if resident else self._clock(), None, resident))

    def _refilled(self, tensor: torch.Tensor, storage: torch.UntypedStorage, found: int | None) -> int:
        size = self._counting.size(tensor, storage)
        if found is not None and self._bytes[found] == size:
            return found
        row = self._watch(storage, self._add(size, Category.PARAMETER, self._clock(), None, False))
        if size:
            self._full[storage._cdata] = weakref.ref(storage)
            self.refills.append((storage._cdata, row))
            self.refilled_rows.add(row)
        return row

    def _add(self, size: int, category: Category, born: int, freed: int | None, resident: bool) -> int:
        row = len(self._bytes)
        self._bytes.append(size)
        self._categories.append(category)
        self._born.append(born)
        self._freed.append(freed)
        self._resident.append(resident)
        return row

    def note_emptied(self) -> None:
        """Before an op: what was filled and is empty by now is gone."""
        for key, ref in list(self._full.items()):
            storage = ref()
            if storage is None or storage.nbytes() == 0:
                del self._full[key]
                row = self._row_of.pop(key, None)
                if row is not None:
                    self._freed[row] = self._clock()

    def is_refilled(self, row: int) -> bool:
        """Whether a row is of a storage that is filled and emptied: no saved tensor keeps its bytes."""
        return row in self.refilled_rows

    def _watch(self, storage: torch.UntypedStorage, row: int) -> int:
        key = storage._cdata
        self._row_of[key] = row
        self._watches.append(weakref.ref(storage, partial(self._gone, key, row)))
        return row

    def alias(self, key: int, row: int) -> None:
        """Let another storage, at this address, stand for a row: the tracer's copy of what autograd saved."""
        self._row_of[key] = row

    def drop_alias(self, key: int) -> None:
        """The copy is gone; its address may be used again."""
        self._row_of.pop(key, None)

    def move(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """From now on the row of ``tensor`` stands for the storage of ``into``, which took its place."""
        for old, new in zip(_parts(tensor), _parts(into), strict=True):
            row = self._row_of.pop(old.untyped_storage()._cdata, None)
            if row is not None:
                self._watch(new.untyped_storage(), row)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """The tensor's storage turned out to be ``category``."""
        for row in self.rows_of((tensor,), category):
            self._categories[row] = category

    def is_resident(self, row: int) -> bool:
        """Whether the storage of a row was there before the step."""
        return self._resident[row]

    def bytes_born_at(self, op: int, rows: Iterable[int]) -> int:
        """Bytes of those rows, each named once, that op ``op`` allocated."""
        size = 0
        for row in rows:
            if self._born[row] == op and not self._resident[row]:
                size += self._bytes[row]
        return size

    def correct(self, op: int, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """The storages that op ``op`` returned turned out to have these sizes: kernels may leave more in one than it needs."""
        if len(rows) != len(sizes):
            return
        for row, size in zip(rows, sizes, strict=True):
            if self._born[row] == op and not self._resident[row]:
                self._bytes[row] = size

    def records(self) -> tuple[Storage, ...]:
        """The rows as records; what is still alive outlives the step."""
        end = self._clock()
        freed = [end if op is None else op for op in self._freed]
        return records_of(Storage, self._bytes, self._categories, self._born, freed, self._resident)

    def close(self) -> None:
        """Stop watching."""
        self._watches.clear()
        if self.compiled is not None:
            self.compiled.close()
        self._at_start.clear()
        self._full.clear()

    def _gone_from_start(self, key: int, size: int, _: object) -> None:
        # Once an op has touched it, it has a row; ``_gone``, which is told of the same death, has then been here or will be.
        if self._at_start.pop(key, None) is not None and key not in self._row_of:
            # No op touched it, but the step let go of it: state that each step replaces, such as a module's last output.
            self._note_replaced(self._add(size, Category.INPUT, 0, self._clock(), True))

    def _gone(self, key: int, row: int, _: object) -> None:
        if self._row_of.get(key) != row:
            return
        del self._row_of[key]
        self._freed[row] = self._clock()
        if self.running:
            self._note_replaced(row)
        if self._resident[row]:
            self._at_start.pop(key, None)

    def _note_replaced(self, row: int) -> None:
        for call, start in reversed(self.running):
            if self._born[row] >= start and not self._resident[row]:
                break  # made by this call, and so by those around it
            self.replaced.append((call, row))


@cache
def is_made_of_others(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of this type have no memory, and consist of tensors that have."""
    return hasattr(kind, "__tensor_flatten__") and not issubclass(kind, FakeTensor)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of which one consists: itself, for most."""
    if not is_made_of_others(type(tensor)):
        return [tensor]
    inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])  # type: ignore[attr-defined]
    return [part for each in inner if isinstance(each, torch.Tensor) for part in _parts(each)]
