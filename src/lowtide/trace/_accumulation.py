"""Where autograd adds up the gradients that meet at a node, and whether it does so in place.

Left alone, autograd adds in place when nobody else holds the gradient that came first. Under a dispatch mode it never does, so that a
trace would count a tensor more at every residual connection than there is. What it would have done can be told from the reference counts,
compared with those of an addition that is known to be of this kind.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch_private import BareDispatchMode, in_backward
from lowtide._torch_tracing import use_counts

_ADD = torch.ops.aten.add.Tensor


class Accumulation:
    """Recognises the additions that autograd itself makes.

    Attributes:
        counts: how many references hold the first argument of one that would be in place, and its storage.
    """

    def __init__(self) -> None:
        """Learn the reference counts from a backward pass of two ops."""
        probe = _Probe()  # type: ignore[no-untyped-call]
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True) * 1
            y = x.sin() + x.cos()
        with probe:
            torch.autograd.grad(y, x)
        self.counts = probe.counts

    def is_in_place(self, args: tuple[Any, ...]) -> bool:
        """Whether the addition about to run is an accumulation that would write into its first argument were nobody watching."""
        if not in_backward() or torch.is_grad_enabled() or len(args) != 2:
            return False
        into, other = args
        if not (isinstance(into, torch.Tensor) and isinstance(other, torch.Tensor)):
            return False
        if into.layout is not torch.strided or other.layout is not torch.strided or into.shape != other.shape:
            return False
        return use_counts(into) == self.counts and (into.is_contiguous() or _is_dense(into))


class _Probe(BareDispatchMode):  # type: ignore[no-untyped-call]
    counts = (0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _ADD:
            self.counts = use_counts(args[0])
        return func(*args, **(kwargs or {}))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a block of memory, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True
