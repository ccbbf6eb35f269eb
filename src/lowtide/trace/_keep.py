"""Where the tracer's copies of saved tensors are: where the tensors were, or out of the way for a step that would not fit."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lowtide._torch_private import is_zero_tensor
from lowtide.engine import transforms_allowed

Storage = Callable[[], torch.UntypedStorage]
Kept = torch.Tensor | Callable[[], torch.Tensor]
"""What there is of a tensor that is gone: one like it, which stays here, or what makes one."""
Like = Callable[[torch.Tensor], Kept]
"""For any tensor on a storage that was copied, what gives one like it on the copy, on the same device."""
Keep = Callable[[torch.Tensor], tuple[Kept, Like]]
"""Copies the storage of a tensor. The first result is for that tensor, the second for all on its storage."""


def kept_by(copy: Callable[[torch.UntypedStorage], Storage]) -> Keep:
    """Keep what a tensor's storage holds by copying storages."""

    def keep(tensor: torch.Tensor) -> tuple[Kept, Like]:
        like = partial(_rebuilt, copy(tensor.untyped_storage()))
        return like(tensor), like

    return keep


def _rebuilt(storage: Storage, saved: torch.Tensor) -> Callable[[], torch.Tensor]:
    # Only what it is like, for a reference to the tensor would keep it alive.
    dtype, device = saved.dtype, saved.device
    where = (saved.storage_offset(), saved.size(), saved.stride())
    return _marked(lambda: torch.empty(0, dtype=dtype, device=device).set_(storage(), *where), saved)


def _marked(make: Callable[[], torch.Tensor], saved: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Make a tensor that is conjugated or changes sign as ``saved`` does: by a mark on it."""
    if not (saved.is_conj() or saved.is_neg()):
        return make
    conjugated, negated = saved.is_conj(), saved.is_neg()
    return lambda: marked(make(), conjugated, negated)


def marked(tensor: torch.Tensor, conjugated: bool, negated: bool) -> torch.Tensor:
    """The tensor with these marks, of which it has none."""
    tensor = tensor.conj() if conjugated else tensor
    return torch._neg_view(tensor) if negated else tensor


def beside(tensor: torch.Tensor) -> tuple[Kept, Like]:
    """Keep what a tensor's storage holds on the same device."""
    # A copy of a tensor that is all of its storage is had in half the time, and handed out in a quarter.
    storage = tensor.untyped_storage()
    if tensor.nbytes == storage.nbytes() and not (tensor.is_conj() or tensor.is_neg()):
        copied = tensor.clone()
        if copied.stride() == tensor.stride():
            return copied, partial(_of_copy, copied)
    like = partial(_rebuilt, _cloned(storage))
    return like(tensor), like


def _of_copy(copied: torch.Tensor, saved: torch.Tensor) -> Kept:
    if saved.dtype is copied.dtype and saved.shape == copied.shape and saved.stride() == copied.stride():
        return copied
    return _rebuilt(copied.untyped_storage, saved)


def shape_only(tensor: torch.Tensor) -> tuple[Kept, Like]:
    """For fake tensors, which have no contents: another storage as large."""
    like = partial(_like, blank(tensor, tensor.device))
    return like(tensor), like


def _like(base: torch.Tensor, saved: torch.Tensor) -> Callable[[], torch.Tensor]:
    dtype, size, stride, offset = saved.dtype, saved.size(), saved.stride(), saved.storage_offset()
    return _marked(lambda: typed(base, dtype).as_strided(size, stride, offset), saved)


def blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bytes as many as the tensor's storage has."""
    return torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=device)


def typed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements of a type, as many as there are whole ones."""
    return base[: len(base) // dtype.itemsize * dtype.itemsize].view(dtype)


def _cloned(storage: torch.UntypedStorage) -> Storage:
    copied = storage.clone()  # type: ignore[no-untyped-call]
    return lambda: copied


def away(storage: torch.UntypedStorage) -> Storage:
    """In host memory; what lives on the host goes to files in the folder for temporary ones, which vanish with the process."""
    return _in_file(storage) if storage.device.type == "cpu" else _on_host(storage)


def _in_file(storage: torch.UntypedStorage) -> Storage:
    if storage.nbytes() == 0:
        return _cloned(storage)
    # Mapped by name, then held by the mapping alone: the system may write it out and read it back as it likes.
    with tempfile.NamedTemporaryFile(prefix="lowtide-") as file:
        mapped: Any = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=storage.nbytes())
    mapped.copy_(storage)
    return lambda: mapped


def _on_host(storage: torch.UntypedStorage) -> Storage:
    host, device = storage.cpu(), storage.device  # type: ignore[no-untyped-call]
    handed_out: list[weakref.ref[Any]] = []

    def get() -> torch.UntypedStorage:
        alive = handed_out[0]() if handed_out else None
        if alive is None:
            alive = torch.UntypedStorage(host.nbytes(), device=device)  # type: ignore[no-untyped-call]
            alive.copy_(host)
            handed_out[:] = [weakref.ref(alive)]
        return alive

    return get


@contextmanager
def saved_away() -> Iterator[None]:
    """A context in which what autograd saves of a step is kept away; but for what function transforms save, which forbid it."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack), transforms_allowed():
        yield


def _pack(tensor: torch.Tensor) -> Any:
    if tensor.is_leaf or tensor.layout != torch.strided or type(tensor) is not torch.Tensor or is_zero_tensor(tensor):
        return tensor
    return _rebuilt(away(tensor.untyped_storage()), tensor)


def _unpack(packed: Any) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed()
