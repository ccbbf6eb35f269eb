"""What autograd saves, seen through saved-tensor hooks that set every tensor free.

Were the hooks to hand the tensors through, one could not tell a tensor that is alive because it was saved
from one that is alive anyway. So the pack hook keeps a copy of the storage instead: the original then dies
when it naturally would, its copy dies when autograd is done with it, and the step stays the step, for
backward computes with the same bits. The step needs no more memory than the plain one: one of the two
storages is always about to go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from lowtide._torch_private import FakeTensor, is_zero_tensor, running_node_name
from lowtide._torch_tracing import no_modes
from lowtide.records import Category, SavedTensor
from lowtide.trace._acceleration import native, records_of
from lowtide.trace._functions import FunctionTable
from lowtide.trace._keep import Keep, Kept, Like
from lowtide.trace._storages import StorageTable

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
"""Types of which nothing is lost when a tensor is made anew on a copy of its storage."""
_UNUSED = (None, "", True)


# Storage, bytes, call, position, copy, type, shape, the tensor itself, and whether a function was at its end.
_Row = tuple[int, int, int | None, int, int | None, torch.dtype, torch.Size, "weakref.ref[torch.Tensor]", bool]


class _Copy:
    """The tracer's copy of a storage, shared by all tensors saved on it at one version."""

    __slots__ = ("__weakref__", "index", "like", "storage")

    def __init__(self, like: Like, index: int, storage: int) -> None:
        self.like, self.index, self.storage = like, index, storage


class _Slot:
    """What autograd holds instead of the tensor; its end is the release."""

    __slots__ = ("_ops", "_released", "copy", "kept", "row")

    def __init__(self, row: int, kept: Kept, copy: _Copy | None, released: list[int | None], ops: list[Any]) -> None:
        self.row, self.kept, self.copy, self._released, self._ops = row, kept, copy, released, ops

    def __del__(self) -> None:
        self._released[self.row] = len(self._ops)


class SavedTable:
    """Saved tensors by index, in the order autograd saved them.

    Args:
        storages: the table of storages.
        ops: those that have run: their number is the clock.
        current_call: index of the innermost module call, if any.
        functions: knows since when a function runs.
        unseen: a context in which neither the tracer nor autograd sees ops.
        keep: makes the copies.
    """

    def __init__(
        self,
        storages: StorageTable,
        ops: list[Any],
        current_call: Callable[[], int | None],
        functions: FunctionTable,
        unseen: Callable[[], Any],
        keep: Keep,
    ) -> None:
        """Start an empty table."""
        self._storages, self._ops, self._current_call, self._functions = storages, ops, current_call, functions
        self._unseen, self._no_modes, self._keep = unseen, no_modes(), keep
        # Columns. Of each first use its time, the node, and whether the tensor was still there.
        self._rows: list[_Row] = []
        self._uses: list[tuple[int, str, bool] | None] = []
        self._released: list[int | None] = []
        self._copies: dict[tuple[int, int], weakref.ref[_Copy]] = {}
        self._copy_count = 0
        # By copy that was handed to backward: when the storage that it got died, None while it is alive.
        self._copy_died: dict[int, int | None] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context under which saved tensors are recorded."""
        compiled = self._storages.compiled
        if native is None or compiled is None:
            return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        # The table does not refer to what is made here, which refers to it.
        saving = native.Saving(
            storages=compiled,
            made=self._rows,
            uses=self._uses,
            released=self._released,
            copies=self._copies,
            refilled=self._storages.refilled_rows,
            running=self._storages.running,
            ops=self._ops,
            functions=self._functions,
            watches=self._watches,
            without_modes=self._no_modes,
            copied=self._copied,
            rebuilt=self._rebuilt,
            handed_out=self._hand_out,
        )
        return torch.autograd.graph.saved_tensors_hooks(saving, saving.unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # made of tensors that may be saved by others as well
            return tensor
        found = self._storages.rows_of((tensor,), Category.ACTIVATION)
        if not found or self._storages.is_refilled(found[0]):
            return tensor
        kept, copy = self._kept(tensor, found[0])
        now, start = len(self._ops), self._functions.running_since
        position = None if copy is None else copy.index
        at_end = start is not None and start < now
        about = (found[0], tensor.nbytes, self._current_call(), now, position, tensor.dtype, tensor.shape, weakref.ref(tensor), at_end)
        self._rows.append(about)
        self._uses.append(None)
        self._released.append(None)
        return _Slot(len(self._rows) - 1, kept, copy, self._released, self._ops)

    def _kept(self, tensor: torch.Tensor, storage: int) -> tuple[Kept, _Copy | None]:
        """How to get a tensor back, and the copy that this needs."""
        if self._storages.is_resident(storage) or type(tensor) not in PLAIN_TENSORS or is_zero_tensor(tensor):  # zeros that have no memory
            return tensor, None
        version = (storage, tensor._version)
        known = self._copies.get(version)
        copy = None if known is None else known()
        return self._copied(tensor, version) if copy is None else (copy.like(tensor), copy)

    def _copied(self, tensor: torch.Tensor, version: tuple[int, int]) -> tuple[Kept, _Copy]:
        with self._unseen():
            kept, like = self._keep(tensor)
        copy = _Copy(like, self._copy_count, version[0])
        self._copy_count += 1
        self._copies[version] = weakref.ref(copy)
        return kept, copy

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Slot):
            return packed  # type: ignore[no-any-return]
        row, kept = packed.row, packed.kept
        if self._uses[row] is None:
            self._uses[row] = (len(self._ops), running_node_name(), self._rows[row][7]() is not None)
        if packed.copy is None:
            return kept  # type: ignore[return-value]
        if isinstance(kept, torch.Tensor):
            with self._no_modes:
                tensor = kept.data  # another one each time, of which no graph hears
        else:
            tensor = self._rebuilt(kept)
        self._hand_out(tensor, packed.copy)
        return tensor

    def _rebuilt(self, kept: Callable[[], torch.Tensor]) -> torch.Tensor:
        with self._unseen():
            return kept()

    def _hand_out(self, tensor: torch.Tensor, copy: _Copy) -> None:
        """A tensor on a copy is on its way to backward: from now on the copy stands for the storage that was saved."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._watches:
            self._storages.alias(key, copy.storage)
            self._watches[key] = weakref.ref(storage, partial(self._copy_gone, key, copy.index))
            self._copy_died[copy.index] = None

    def _copy_gone(self, key: int, index: int, _: object) -> None:
        self._copy_died[index] = len(self._ops)
        self._watches.pop(key, None)
        self._storages.drop_alias(key)

    def records(self) -> tuple[SavedTensor, ...]:
        """The rows as records; what autograd still holds is released after the last op.

        A copy that outlived its slots was handed on by backward (as a gradient, say): the plain run would have
        held the original as long, so the last slot counts as released then.
        """
        if not self._rows:
            return ()
        storages, sizes, calls, positions, copies, dtypes, shapes, _, at_end = zip(*self._rows, strict=True)
        uses = [_UNUSED if use is None else use for use in self._uses]
        used, nodes, shared = zip(*uses, strict=True)
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in set(dtypes)}
        columns = (used, self._true_releases(copies), nodes, [names[dtype] for dtype in dtypes], list(map(tuple, shapes)), shared, at_end)
        return records_of(SavedTensor, storages, sizes, calls, positions, *columns)

    def _true_releases(self, copies: Sequence[int | None]) -> list[int]:
        """When autograd let go of each, given the copy of each."""
        end = len(self._ops)
        released = [end if op is None else op for op in self._released]
        last: dict[int, int] = {}
        for index, copy in enumerate(copies):
            if copy is not None and released[last.setdefault(copy, index)] <= released[index]:
                last[copy] = index
        for copy, index in last.items():
            died = self._copy_died.get(copy, 0)
            released[index] = max(released[index], end if died is None else died)
        return released
