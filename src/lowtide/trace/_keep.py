"""Where the tracer's copies of saved tensors are: where the tensors were, or out of the way for a step that would not fit."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import torch

Keep = Callable[[torch.UntypedStorage], Callable[[], torch.UntypedStorage]]
"""Copies a storage. The result gives one with the same contents on the same device, as often as it is called."""


def beside(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
    """On the same device."""
    copied = storage.clone()  # type: ignore[no-untyped-call]
    return lambda: copied


def away(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
    """In host memory; what lives on the host goes to files in the folder for temporary ones, which vanish with the process."""
    return _in_file(storage) if storage.device.type == "cpu" else _on_host(storage)


def _in_file(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
    if storage.nbytes() == 0:
        return beside(storage)
    # Mapped by name, then held by the mapping alone: the system may write it out and read it back as it likes.
    with tempfile.NamedTemporaryFile(prefix="lowtide-") as file:
        mapped: Any = torch.UntypedStorage.from_file(file.name, shared=True, nbytes=storage.nbytes())
    mapped.copy_(storage)
    return lambda: mapped


def _on_host(storage: torch.UntypedStorage) -> Callable[[], torch.UntypedStorage]:
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


def saved_away() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which what autograd saves of a step is kept away."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> Any:
    if tensor.is_leaf or tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
        return tensor
    shape = (tensor.storage_offset(), tensor.size(), tensor.stride())
    return away(tensor.untyped_storage()), tensor.dtype, tensor.device, shape


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    storage, dtype, device, shape = packed
    return torch.empty(0, dtype=dtype, device=device).set_(storage(), *shape)
