"""The processes that ``torchrun`` started: joined, where the target did not do that itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


@contextmanager
def joined(timeout_s: float = 300.0) -> Iterator[None]:
    """Make this process one of the group that ``torchrun`` says there is; what the target joins by itself is left to it.

    Args:
        timeout_s: how long the others are waited for.
    """
    ours = dist.is_available() and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
    if ours:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        if ours:
            dist.destroy_process_group()


def is_first() -> bool:
    """Whether this is the process that prints the verdict."""
    joined_already = dist.is_available() and dist.is_initialized()
    return (dist.get_rank() if joined_already else int(os.environ.get("RANK", "0"))) == 0
