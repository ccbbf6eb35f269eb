"""The phases of a step as they happen: backward by the call that starts it, the optimizer by its hooks, the rest is forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

FORWARD, BACKWARD, OPTIMIZER, REPLAY = "forward", "backward", "optimizer", "replay"

Entered = Callable[[str], AbstractContextManager[Any]]
"""Given a phase, a context that is entered when it begins and left when it ends."""


@contextmanager
def phases_told(entered: Entered) -> Iterator[None]:
    """While in this context, be told when backward and the optimizer run.

    ``torch.autograd.backward`` and ``torch.autograd.grad`` are replaced meanwhile: hooks on tensors would tell of backward only
    after its first ops, and the largest of a step are often among them.
    """
    with ExitStack() as stack:
        for name in ("backward", "grad"):
            original = getattr(torch.autograd, name)
            setattr(torch.autograd, name, _telling(original, entered))
            stack.callback(setattr, torch.autograd, name, original)
        stack.enter_context(_optimizers_told(entered))
        yield


def _telling(original: Callable[..., Any], entered: Entered) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        with entered(BACKWARD):
            return original(*args, **kwargs)

    return told


@contextmanager
def _optimizers_told(entered: Entered) -> Iterator[None]:
    running: list[ExitStack] = []

    def begin(*_: Any) -> None:
        stack = ExitStack()
        stack.enter_context(entered(OPTIMIZER))
        running.append(stack)

    def end(*_: Any) -> None:
        running.pop().close()

    handles = [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for stack in reversed(running):  # the optimizer's step raised
            stack.close()
