"""The tensors among what an op is given or returns."""

from __future__ import annotations

from typing import Any

import torch


def tensors_of_op(value: Any) -> list[torch.Tensor]:
    """Those that an op is given or returns: by themselves, or in lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of_op(item)] if isinstance(value, (list, tuple)) else []
