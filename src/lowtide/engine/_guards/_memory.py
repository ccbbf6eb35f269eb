"""The memory behind parameters and buffers: copies for a call to write to, and what hooks put in its place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide import _torch_private as private


def writable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer as it is now, for a call to write to."""
    return tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor.clone()


def put_data(tensors: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    """Undo what hooks did to the memory behind parameters: in backward the framework has it where it wants it."""
    for tensor, before in zip(tensors, data, strict=False):
        if tensor.shape != before.shape or tensor.data_ptr() != before.data_ptr():
            tensor.data = before


def copy_before_write(tensors: list[torch.Tensor | None], versions: list[int], key: int) -> None:
    """What is in this memory is about to be written to, by a call that was not known to: have it held as it is.

    Args:
        tensors, versions: as they were taken for the call; changed in place.
        key: of the memory.
    """
    for index, tensor in enumerate(tensors):
        if tensor is not None and versions[index] >= 0 and private.storage_key(tensor) == key and tensor._version == versions[index]:
            tensors[index], versions[index] = writable_copy(tensor), 0


def held_as_taken(tensors: Sequence[torch.Tensor], versions: Sequence[int], written: Sequence[int]) -> list[int]:
    """Of what calls write to, that which is as it was when it was taken: copied, or not written to since.

    What was taken itself, before that was known, and has been written to is left to the replay: it fails if it uses it, see ``checked``.
    """
    return [index for index in written if versions[index] < 0 or tensors[index]._version == versions[index]]
