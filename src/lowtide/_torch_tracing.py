"""What a trace needs of how torch runs ops that has no public name. All of it was read in 2.11, 2.13 and 2.14."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from lowtide._torch_private import without_dispatch_modes


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others, so that what it does depends on its arguments."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def kernel_of(func: Any) -> Any:
    """What calls an operator as the operator does, which is a function of Python around it."""
    return func._op if type(func) is torch._ops.OpOverload else func


def _left_out_in(*contexts: Callable[[], Any]) -> Callable[[], Any]:
    """Makes one context of several that are in force from when they are made; to enter and leave it takes a quarter of the time.

    What it makes may be entered again, but not inside itself, nor in another thread meanwhile.
    """
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return partial(torch._C._ExcludeDispatchKeyGuard, torch._C._dispatch_tls_local_exclude_set())


# Contexts in which ops do not go through dispatch modes, nor through autograd either.
no_modes = _left_out_in(without_dispatch_modes)
unseen = _left_out_in(without_dispatch_modes, torch._C._AutoDispatchBelowAutograd)

current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The backward node that is running, if any."""


def running_sequence_number() -> int | None:
    """The number of the backward node that is running."""
    node = current_node()
    return None if node is None else node._sequence_nr()


def use_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """How many references in C++ hold this tensor, and how many tensors hold its storage."""
    return tensor._use_count(), storage_use_count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors hold the storage at this address."""
