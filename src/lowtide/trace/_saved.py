"""What autograd saves, seen through saved-tensor hooks that set every tensor free.

Were the hooks to hand the tensors through, one could not tell a tensor that is alive because it was saved
from one that is alive anyway. So the pack hook keeps a copy of the storage instead: the original then dies
when it naturally would, its copy dies when autograd is done with it, and the step stays the step, for
backward computes with the same bits. The step needs no more memory than the plain one: one of the two
storages is always about to go.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lowtide._torch_private import FakeTensor, is_zero_tensor, running_node_name, without_dispatch_modes
from lowtide.records import Category, SavedTensor
from lowtide.trace._keep import Keep, Kept, Like
from lowtide.trace._storages import StorageTable

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
"""Types of which nothing is lost when a tensor is made anew on a copy of its storage."""


@dataclass(slots=True)
class _Row:
    storage: int
    bytes: int
    call: int | None
    position: int
    copy: int | None
    dtype: torch.dtype
    shape: torch.Size
    tensor: weakref.ref[torch.Tensor]
    at_end: bool
    used: int | None = None
    released: int | None = None
    node: str = ""
    shared: bool = True


class _Copy:
    """The tracer's copy of a storage, shared by all tensors saved on it at one version."""

    __slots__ = ("__weakref__", "index", "like", "storage")

    def __init__(self, like: Like, index: int, storage: int) -> None:
        self.like, self.index, self.storage = like, index, storage


class _Slot:
    """What autograd holds instead of the tensor; its end is the release."""

    __slots__ = ("_clock", "copy", "kept", "row")

    def __init__(self, row: _Row, kept: Kept, copy: _Copy | None, clock: Callable[[], int]) -> None:
        self.row, self.kept, self.copy, self._clock = row, kept, copy, clock

    def __del__(self) -> None:
        self.row.released = self._clock()


class SavedTable:
    """Saved tensors by index, in the order autograd saved them.

    Args:
        storages: the table of storages.
        clock: the number of ops that have run.
        current_call: index of the innermost module call, if any.
        function_start: how many ops had run when the function that runs was called, if one does.
        unseen: a context in which neither the tracer nor autograd sees ops.
        keep: makes the copies.
    """

    def __init__(
        self,
        storages: StorageTable,
        clock: Callable[[], int],
        current_call: Callable[[], int | None],
        function_start: Callable[[], int | None],
        unseen: Callable[[], Any],
        keep: Keep,
    ) -> None:
        """Start an empty table."""
        self._keep = keep
        self._storages, self._clock, self._current_call, self._unseen = storages, clock, current_call, unseen
        self._function_start = function_start
        self._rows: list[_Row] = []
        self._copies: dict[tuple[int, int], weakref.ref[_Copy]] = {}
        self._copy_count = 0
        # By copy that was handed to backward: when the storage that it got died, None while it is alive.
        self._copy_died: dict[int, int | None] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context under which saved tensors are recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # made of tensors that may be saved by others as well
            return tensor
        found = self._storages.rows_of((tensor,), Category.ACTIVATION)
        if not found or self._storages.is_refilled(found[0]):
            return tensor
        kept, copy = self._kept(tensor, found[0])
        now, start = self._clock(), self._function_start()
        row = _Row(
            found[0],
            tensor.nbytes,
            self._current_call(),
            now,
            None if copy is None else copy.index,
            tensor.dtype,
            tensor.shape,
            weakref.ref(tensor),
            start is not None and start < now,
        )
        self._rows.append(row)
        return _Slot(row, kept, copy, self._clock)

    def _kept(self, tensor: torch.Tensor, storage: int) -> tuple[Kept, _Copy | None]:
        """How to get a tensor back, and the copy that this needs."""
        if self._storages.is_resident(storage) or type(tensor) not in PLAIN_TENSORS or is_zero_tensor(tensor):  # zeros that have no memory
            return tensor, None
        version = (storage, tensor._version)
        known = self._copies.get(version)
        copy = None if known is None else known()
        if copy is not None:
            return copy.like(tensor), copy
        with self._unseen():
            kept, like = self._keep(tensor)
        copy = _Copy(like, self._copy_count, storage)
        self._copy_count += 1
        self._copies[version] = weakref.ref(copy)
        return kept, copy

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Slot):
            return packed  # type: ignore[no-any-return]
        row, kept = packed.row, packed.kept
        if row.used is None:
            row.used, row.node, row.shared = self._clock(), running_node_name(), row.tensor() is not None
        if packed.copy is None:
            return kept  # type: ignore[return-value]
        if isinstance(kept, torch.Tensor):
            with without_dispatch_modes():
                tensor = kept.data  # another one each time, of which no graph hears
        else:
            with self._unseen():
                tensor = kept()
        self._hand_out(tensor, packed.copy)
        return tensor

    def _hand_out(self, tensor: torch.Tensor, copy: _Copy) -> None:
        """A tensor on a copy is on its way to backward: from now on the copy stands for the storage that was saved."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._watches:
            self._storages.alias(key, copy.storage)
            self._watches[key] = weakref.ref(storage, partial(self._copy_gone, key, copy.index))
            self._copy_died[copy.index] = None

    def _copy_gone(self, key: int, index: int, _: object) -> None:
        self._copy_died[index] = self._clock()
        self._watches.pop(key, None)
        self._storages.drop_alias(key)

    def records(self) -> tuple[SavedTensor, ...]:
        """The rows as records; what autograd still holds is released after the last op.

        A copy that outlived its slots was handed on by backward (as a gradient, say): the plain run would have
        held the original as long, so the last slot counts as released then.
        """
        end = self._clock()
        released = [end if row.released is None else row.released for row in self._rows]
        last: dict[int, int] = {}
        for index, row in enumerate(self._rows):
            if row.copy is not None and released[last.setdefault(row.copy, index)] <= released[index]:
                last[row.copy] = index
        for copy, index in last.items():
            died = self._copy_died.get(copy, 0)
            released[index] = max(released[index], end if died is None else died)
        names = {dtype: str(dtype).removeprefix("torch.") for dtype in {row.dtype for row in self._rows}}
        return tuple(
            [
                SavedTensor(
                    r.storage,
                    r.bytes,
                    r.call,
                    r.position,
                    r.used,
                    gone,
                    r.node,
                    names[r.dtype],
                    tuple(r.shape),
                    r.shared,
                    r.at_end,
                )
                for r, gone in zip(self._rows, released, strict=True)
            ]
        )
