"""The memory behind parameters and buffers: copies for a call to write to, and what hooks put in its place."""

from __future__ import annotations

import torch


def writable_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter or buffer as it is now, for a call to write to."""
    return tensor.detach().clone().requires_grad_() if tensor.requires_grad else tensor.clone()


def put_data(tensors: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    """Undo what hooks did to the memory behind parameters: in backward the framework has it where it wants it."""
    for tensor, before in zip(tensors, data, strict=False):
        if tensor.shape != before.shape or tensor.data_ptr() != before.data_ptr():
            tensor.data = before
