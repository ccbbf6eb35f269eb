"""The table of storages: which allocations a step makes, touches and gives back.

A storage is watched through a weak reference, whose callback runs at the very moment the last tensor on
it dies. The table itself keeps nothing alive.

A tensor that is made of others, such as one spread over processes, says how large the whole is and has no memory: those that it is made of
are entered in its place. Some storages are there all the time and hold bytes only now and then, for a sharding framework fills and empties
them: each time that one is full is a row of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from lowtide._torch_private import FakeTensor, is_functorch_wrapped
from lowtide.records import Category, Storage
from lowtide.trace._counting import Counting

_STRIDED = torch.strided
_HAVE_MEMORY = frozenset({torch.Tensor, torch.nn.Parameter})


@dataclass(slots=True)
class _Row:
    bytes: int
    category: Category
    born: int
    freed: int | None
    resident: bool


class StorageTable:
    """Storages by index, in order of first sight.

    Args:
        counting: how bytes are counted; storages on other devices are rows of zero bytes.
        clock: the number of ops that have run.
        stand_in: what is entered in a tensor's place.

    Attributes:
        running: the module calls that are running, the innermost last: index, and first op.
        replaced: call and row of each storage that was there before the call and died while it ran.
        refills: key and row of every storage that was empty at the start and was filled.
    """

    def __init__(
        self, counting: Counting, clock: Callable[[], int], stand_in: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Start an empty table."""
        self._counting, self._clock, self._stand_in = counting, clock, stand_in
        self.running: list[tuple[int, int]] = []
        self.replaced: list[tuple[int, int]] = []
        self._rows: list[_Row] = []
        self._index: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._at_start: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._empty_at_start: set[int] = set()
        self._full: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.refills: list[tuple[int, int]] = []
        self._refilled_rows: set[int] = set()

    def remember_resident(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what is alive before the step, so that it is told from what the step allocates."""
        for tensor in tensors:
            if tensor.layout is not _STRIDED or is_functorch_wrapped(tensor) or is_made_of_others(type(tensor)):
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 < tensor.numel():
                self._empty_at_start.add(storage._cdata)
            # The address of one that dies untouched is used again: it must not vouch for its successor.
            gone = partial(self._gone_from_start, storage._cdata, self._counting.size(tensor))
            self._at_start[storage._cdata] = weakref.ref(storage, gone)

    def index(self, tensor: torch.Tensor, category: Category) -> int | None:
        """Row of the tensor's storage, entered under ``category`` when it is new; ``None`` if it has none."""
        rows = self.rows_of((tensor,), category)
        return rows[0] if rows else None

    def rows_of(self, tensors: Sequence[torch.Tensor], category: Category) -> tuple[int, ...]:
        """Rows of the storages of several tensors, each once."""
        rows: list[int] = []
        for tensor in tensors:
            if tensor.layout is not _STRIDED or is_functorch_wrapped(tensor):
                continue
            if type(tensor) not in _HAVE_MEMORY and is_made_of_others(type(tensor)):
                rows += self.rows_of(_parts(tensor), category)
                continue
            counted = tensor if self._stand_in is None else self._stand_in(tensor)
            storage = counted.untyped_storage()
            row = self._index.get(storage._cdata)
            if storage._cdata in self._empty_at_start:
                row = self._refilled(counted, storage, row)
            # What needs a stand-in was made by nothing that was recorded.
            rows.append(self._enter(counted, storage, category, stands_in=counted is not tensor) if row is None else row)
        return tuple(rows) if len(rows) < 2 else tuple(dict.fromkeys(rows))

    def _refilled(self, tensor: torch.Tensor, storage: torch.UntypedStorage, found: int | None) -> int:
        """Row of a storage that is filled and emptied."""
        size = self._counting.size(tensor)
        if found is not None and self._rows[found].bytes == size:
            return found
        index = len(self._rows)
        self._rows.append(_Row(size, Category.PARAMETER, self._clock(), None, False))
        self._watch(storage, index)
        if size:
            self._full[storage._cdata] = weakref.ref(storage)
            self.refills.append((storage._cdata, index))
            self._refilled_rows.add(index)
        return index

    def note_emptied(self) -> None:
        """Before an op: what was filled and is empty by now is gone."""
        for key, ref in list(self._full.items()):
            storage = ref()
            if storage is None or storage.nbytes() == 0:
                del self._full[key]
                index = self._index.pop(key, None)
                if index is not None:
                    self._rows[index].freed = self._clock()

    def is_refilled(self, index: int) -> bool:
        """Whether row ``index`` is of a storage that is filled and emptied: no saved tensor keeps its bytes."""
        return index in self._refilled_rows

    def _enter(self, tensor: torch.Tensor, storage: torch.UntypedStorage, category: Category, *, stands_in: bool) -> int:
        index = len(self._rows)
        resident = stands_in or storage._cdata in self._at_start
        if resident and category in (Category.ACTIVATION, Category.TEMPORARY):
            category = Category.INPUT
        self._rows.append(_Row(self._counting.size(tensor), category, 0 if resident else self._clock(), None, resident))
        self._watch(storage, index)
        return index

    def _watch(self, storage: torch.UntypedStorage, index: int) -> None:
        key = storage._cdata
        self._index[key] = index
        self._watches[key] = weakref.ref(storage, partial(self._freed, key, index))

    def alias(self, storage: torch.UntypedStorage, index: int) -> None:
        """Let another storage stand for row ``index``: the tracer's copy of what autograd saved."""
        self._index[storage._cdata] = index

    def drop_alias(self, key: int) -> None:
        """The copy is gone; its address may be used again."""
        self._index.pop(key, None)

    def move(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """From now on the row of ``tensor`` stands for the storage of ``into``, which took its place."""
        for old, new in zip(_parts(tensor), _parts(into), strict=True):
            key = old.untyped_storage()._cdata
            self._watches.pop(key, None)
            index = self._index.pop(key, None)
            if index is not None:
                self._watch(new.untyped_storage(), index)

    def mark(self, tensor: torch.Tensor, category: Category) -> None:
        """The tensor's storage turned out to be ``category``."""
        for index in self.rows_of([tensor], category):
            self._rows[index].category = category

    def born_at(self, index: int) -> int:
        """Op at which the storage of row ``index`` was allocated."""
        return self._rows[index].born

    def is_resident(self, index: int) -> bool:
        """Whether the storage of row ``index`` was there before the step."""
        return self._rows[index].resident

    def bytes_born_at(self, op: int, rows: Iterable[int]) -> int:
        """Bytes of those rows, each named once, that op ``op`` allocated."""
        size = 0
        for index in rows:
            row = self._rows[index]
            if row.born == op and not row.resident:
                size += row.bytes
        return size

    def correct(self, op: int, rows: Sequence[int], sizes: Sequence[int]) -> None:
        """The storages that op ``op`` returned turned out to have these sizes: kernels may leave more in one than it needs."""
        if len(rows) != len(sizes):
            return
        for row, size in zip(rows, sizes, strict=True):
            if self._rows[row].born == op and not self._rows[row].resident:
                self._rows[row].bytes = size

    def records(self) -> tuple[Storage, ...]:
        """The rows as records; what is still alive outlives the step."""
        end = self._clock()
        return tuple([Storage(r.bytes, r.category, r.born, end if r.freed is None else r.freed, r.resident) for r in self._rows])

    def close(self) -> None:
        """Stop watching."""
        self._watches.clear()
        self._at_start.clear()
        self._full.clear()

    def _gone_from_start(self, key: int, size: int, _: object) -> None:
        # Once an op has touched it, it has a row; ``_freed``, which is told of the same death, has then been here or will be.
        if self._at_start.pop(key, None) is not None and key not in self._index:
            # No op touched it, but the step let go of it: state that each step replaces, such as a module's last output.
            self._rows.append(_Row(size, Category.INPUT, 0, self._clock(), True))
            self._note_replaced(len(self._rows) - 1)

    def _freed(self, key: int, index: int, _: object) -> None:
        self._rows[index].freed = self._clock()
        if self.running:
            self._note_replaced(index)
        self._index.pop(key, None)
        self._watches.pop(key, None)
        self._at_start.pop(key, None)

    def _note_replaced(self, index: int) -> None:
        row = self._rows[index]
        for call, start in reversed(self.running):
            if row.born >= start and not row.resident:
                break  # made by this call, and so by those around it
            self.replaced.append((call, index))


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
