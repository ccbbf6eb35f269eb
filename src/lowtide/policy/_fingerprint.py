"""A model's structure as one short string, so that a plan is never installed on another model."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from lowtide.policy._order import own_class

if TYPE_CHECKING:
    from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Digest of what a plan depends on: module paths and classes, parameter shapes and dtypes.

    Values, devices, batch sizes and training flags do not enter, so a plan made on one machine
    fits the same model on another.

    Args:
        model: any module.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path, module in model.named_modules(remove_duplicate=False):
        digest.update(f"{path}:{own_class(module).__qualname__}\n".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
    return digest.hexdigest()
