"""Hashes of tensors, bit by bit, to see whether a replay made what the forward had."""

from __future__ import annotations

import ctypes
import zlib
from typing import Any

import torch

from lowtide import _torch_private as private

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def hash_of(tensor: torch.Tensor) -> Any:
    """A hash of a tensor's bits; on an accelerator it stays there until it is compared. None if there are no bits to read."""
    with torch.no_grad(), private.without_function_modes(), private.without_dispatch_modes():
        try:
            return _hash(tensor.detach()) if type(tensor) in _PLAIN else _hash_of_parts(tensor)
        except (RuntimeError, TypeError, NotImplementedError, AttributeError):  # the last: a ragged tensor's sizes are no numbers
            return None


def _hash_of_parts(tensor: Any) -> list[Any] | None:
    """Of a tensor that is made of others, as one spread over processes is: it has no memory of its own."""
    if hasattr(tensor, "trigger_wait"):  # a collective is to fill it
        return [hash_of(tensor.trigger_wait())]
    return [hash_of(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "__tensor_flatten__") else None


def _hash(tensor: torch.Tensor) -> Any:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    if private.is_zero_tensor(tensor):
        return None
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if tensor.device.type == "cpu":
        return _hash_of_memory(flat.data_ptr(), flat.numel())
    whole, thinned = torch.hash_tensor(flat), torch.hash_tensor(flat[::3])
    return torch.stack([whole.view(torch.int64), thinned.view(torch.int64)])


def _hash_of_memory(address: int, size: int) -> int:
    """Read where it is. Not by way of ``numpy()``: that forbids for good that the storage is resized, as sharding frameworks do. Nor by
    a type of this very size: each such type is a cycle, which lives until the garbage collector comes by.
    """
    found, end = 0, address + size
    while address + _PIECE <= end:
        found = zlib.crc32(_Piece.from_address(address), found)
        address += _PIECE
    return zlib.crc32(ctypes.string_at(address, end - address), found)


_PIECE = 1 << 16
_Piece = ctypes.c_char * _PIECE


def same_hash(one: Any, other: Any) -> bool:
    """Whether two hashes are equal; what could not be hashed is taken to be."""
    if one is None or other is None:
        return True
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same_hash, one, other))
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


def meta_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype and strides, as far as the layout has them."""
    try:
        return tensor.shape, tensor.dtype, tensor.stride()
    except RuntimeError:
        return tensor.layout, tensor.dtype, None
