"""For code with side effects that a replay must not repeat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from lowtide.engine._thread import state

F = TypeVar("F", bound=Callable[..., Any])


def is_replaying() -> bool:
    """Whether this code runs again in backward, to make what backward needs, rather than in the forward itself."""
    if not torch.compiler.is_compiling():
        state.asked = True
    return state.depth > 0


def once(hook: F) -> F:
    """A module hook, or any function called for its effects, that does nothing in a replay.

    In a replay it returns ``None``, which leaves inputs and outputs of a module as they are.

    Args:
        hook: what to call in the original forward only.

    >>> from torch import nn
    >>> handle = nn.Linear(2, 2).register_forward_hook(once(lambda module, args, output: print(output.shape)))
    """

    @functools.wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if is_replaying() else hook(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def original_only() -> Iterator[bool]:
    """A context for what belongs to the original forward alone; says whether this is it.

    >>> with original_only() as original:
    ...     if original:
    ...         print("logged once")
    logged once
    """
    yield not is_replaying()
