"""What was alive when a CUDA allocation failed, read from the allocator in the moment before the error is raised.

By the time Python sees the error, the frames that held the tensors are gone. The allocator calls an observer before that.
It can be given observers but never rid of one, so there is one for the process, which tells the watches that are open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.explain import OutOfMemory, holdings
from lowtide.records import Category, Phase
from lowtide.trace import find_optimizers, parts_of_sparse, source_line

_UNKNOWN = "an unknown line"
_ACTIVE = "active_allocated"
_LIBRARY = "/site-packages/torch/"


class MemoryWatch:
    """Waits for a CUDA allocation to fail.

    Attributes:
        report: what was alive when it did; ``None`` as long as none did.
    """

    def __init__(self, model: nn.Module) -> None:
        """Name the blocks of ``model`` and its optimizers by what they are."""
        self.report: OutOfMemory | None = None
        self._model = model

    def _failed(self, device: int, asked: int, free: int) -> None:
        segments = [s for s in private.allocator_snapshot() if s["device"] == device]
        blocks = [b for segment in segments for b in _blocks(segment)]
        alive, reserved = sum(b["size"] for b in blocks), sum(s["total_size"] for s in segments)
        known = _known_blocks(self._model)
        backward = private.in_backward()
        self.report = OutOfMemory(
            limit_bytes=reserved + free,
            alive_bytes=alive,
            asked_bytes=asked,
            reserved_bytes=reserved,
            where=_where(backward),
            phase=(Phase.BACKWARD if backward else Phase.FORWARD).value,
            holdings=holdings(_holding(block, known) for block in blocks),
        )


_open: list[MemoryWatch] = []


@contextmanager
def memory_watch(model: nn.Module) -> Iterator[MemoryWatch]:
    """Watch the CUDA allocator; after ``torch.OutOfMemoryError`` the watch has a report of what was alive.

    While it watches, each allocation notes the line that asked for it, which costs some microseconds. Where CUDA is not
    available nothing is watched: ``lowtide.explain.out_of_memory`` gives the same report from a trace and a limit.

    Args:
        model: whose parameters, gradients and optimizer state are named.
    """
    watch = MemoryWatch(model)
    if not torch.cuda.is_available():
        yield watch
        return
    _observe_once()
    private.record_allocations(True)
    _open.append(watch)
    try:
        yield watch
    finally:
        _open.remove(watch)
        private.record_allocations(bool(_open))


@cache
def _observe_once() -> None:
    private.attach_out_of_memory_observer(_observed)


def _observed(device: int, asked: int, _allocated: int, free: int) -> None:
    for watch in _open:
        watch._failed(device, asked, free)


def _blocks(segment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The blocks of a segment that are in use, with their addresses."""
    address = int(segment["address"])
    for block in segment["blocks"]:
        if block["state"] == _ACTIVE:
            yield {"address": block.get("address", address), "size": int(block["size"]), "frames": block.get("frames", [])}
        address += int(block["size"])


def _known_blocks(model: nn.Module) -> dict[int, tuple[str, Category]]:
    """Address to owner and use, for what belongs to the model and its optimizers."""
    found: dict[int, tuple[str, Category]] = {}
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        found.update(dict.fromkeys(_addresses(tensor), (_module_of(name), Category.PARAMETER)))
        if tensor.grad is not None:
            found.update(dict.fromkeys(_addresses(tensor.grad), (_module_of(name), Category.GRADIENT)))
    for optimizer in find_optimizers(model):
        for state in optimizer.state.values():
            tensors = (value for value in state.values() if isinstance(value, torch.Tensor))
            found.update({at: (type(optimizer).__name__, Category.OPTIMIZER) for tensor in tensors for at in _addresses(tensor)})
    return found


def _addresses(tensor: torch.Tensor) -> list[int]:
    """Of the blocks that hold a tensor: several for a sparse one."""
    return [part.untyped_storage().data_ptr() for part in parts_of_sparse(tensor) or (tensor,)]


def _module_of(name: str) -> str:
    return name.rpartition(".")[0] or "(model)"


def _holding(block: dict[str, Any], known: dict[int, tuple[str, Category]]) -> tuple[str, Category, int]:
    owner, category = known.get(block["address"], (_line(block["frames"]), Category.ACTIVATION))
    return owner, category, block["size"]


def _line(frames: list[dict[str, Any]]) -> str:
    """The user's innermost line of those that asked for a block."""
    theirs = (f for f in frames if _LIBRARY not in f["filename"] and f["filename"].endswith(".py") and "/lowtide/" not in f["filename"])
    return next((f"{frame['filename']}:{frame['line']}" for frame in theirs), _UNKNOWN)


def _where(backward: bool) -> str:
    line = source_line()
    node = private.running_node_name() if backward else ""
    return f"at {node or line or _UNKNOWN}" + (f", {line}" if node and line else "")
