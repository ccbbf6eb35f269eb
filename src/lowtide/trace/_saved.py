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

from lowtide._torch_private import FakeTensor, running_node_name
from lowtide.records import Category, SavedTensor
from lowtide.trace._keep import Keep
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
    shape: tuple[int, ...]
    tensor: weakref.ref[torch.Tensor]
    used: int | None = None
    released: int | None = None
    node: str = ""
    shared: bool = True
    at_end: bool = False


class _Copy:
    """The tracer's copy of a storage, shared by all tensors saved on it at one version."""

    __slots__ = ("__weakref__", "index", "like")

    def __init__(self, like: Callable[[torch.Tensor], Callable[[], torch.Tensor]], index: int) -> None:
        self.like, self.index = like, index


class _Slot:
    """What autograd holds instead of the tensor; its end is the release."""

    __slots__ = ("_on_release", "row", "source")

    def __init__(self, row: int, source: Callable[[], torch.Tensor], on_release: Callable[[int], None]) -> None:
        self.row, self.source, self._on_release = row, source, on_release

    def __del__(self) -> None:
        self._on_release(self.row)


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
        storage = self._storages.index(tensor, Category.ACTIVATION)
        if storage is None or self._storages.is_refilled(storage):
            return tensor
        source, copy = self._source(tensor, storage)
        size = tensor.numel() * tensor.element_size()
        now, start = self._clock(), self._function_start()
        row = _Row(storage, size, self._current_call(), now, copy, tensor.dtype, tuple(tensor.shape), weakref.ref(tensor))
        row.at_end = start is not None and start < now
        self._rows.append(row)
        return _Slot(len(self._rows) - 1, source, self._release)

    def _source(self, tensor: torch.Tensor, storage: int) -> tuple[Callable[[], torch.Tensor], int | None]:
        """How to get the tensor back, and the index of the copy that this needs."""
        if self._storages.is_resident(storage) or type(tensor) not in PLAIN_TENSORS:
            return (lambda: tensor), None
        known = self._copies.get((storage, tensor._version))
        copy = None if known is None else known()
        if copy is None:
            copy = self._new_copy(tensor, storage)
        rebuild = copy.like(tensor)
        return (lambda: self._handed_out(rebuild(), copy, storage)), copy.index

    def _new_copy(self, tensor: torch.Tensor, storage: int) -> _Copy:
        with self._unseen():
            copy = _Copy(self._keep(tensor), self._copy_count)
        self._copy_count += 1
        self._copies[storage, tensor._version] = weakref.ref(copy)
        return copy

    def _handed_out(self, tensor: torch.Tensor, copy: _Copy, storage: int) -> torch.Tensor:
        """A tensor on a copy, on its way to backward: from now on the copy stands for the storage that was saved."""
        found = tensor.untyped_storage()
        if found._cdata not in self._watches:
            self._storages.alias(found, storage)
            self._watches[found._cdata] = weakref.ref(found, partial(self._copy_gone, found._cdata, copy.index))
            self._copy_died[copy.index] = None
        return tensor

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Slot):
            return packed  # type: ignore[no-any-return]
        row = self._rows[packed.row]
        if row.used is None:
            row.used, row.node, row.shared = self._clock(), running_node_name(), row.tensor() is not None
        with self._unseen():
            return packed.source()

    def _release(self, index: int) -> None:
        self._rows[index].released = self._clock()

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
        return tuple(
            SavedTensor(
                r.storage,
                r.bytes,
                r.call,
                r.position,
                r.used,
                gone,
                r.node,
                str(r.dtype).removeprefix("torch."),
                r.shape,
                r.shared,
                r.at_end,
            )
            for r, gone in zip(self._rows, released, strict=True)
        )
