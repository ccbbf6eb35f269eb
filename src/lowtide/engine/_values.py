"""Hashes of tensors, bit by bit, to see whether a replay made what the forward had."""

from __future__ import annotations

import zlib
from typing import Any

import torch

from lowtide import _torch_private as private


def hash_of(tensor: torch.Tensor) -> Any:
    """A hash of a tensor's bits; on an accelerator it stays there until it is compared. None if there are no bits to read."""
    with torch.no_grad(), private.without_function_modes(), private.without_dispatch_modes():
        try:
            return _hash(tensor.detach())
        except (RuntimeError, TypeError, NotImplementedError):
            return None


def _hash(tensor: torch.Tensor) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return zlib.crc32(flat.numpy().data)
    whole, thinned = torch.hash_tensor(flat), torch.hash_tensor(flat[::3])
    return torch.stack([whole.view(torch.int64), thinned.view(torch.int64)])


def same_hash(one: Any, other: Any) -> bool:
    """Whether two hashes are equal; what could not be hashed is taken to be."""
    if one is None or other is None:
        return True
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)
