"""The step without a plan: as it is, or, where the device has no room for that, with what autograd saves kept off it.

Kept away, a saved tensor is on the device only while the node that wants it runs. A replay brings back a whole region at a time, so a step
that does not fit even so fits under no plan either.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext

import torch

from lowtide.trace import saved_away

_CPU_MESSAGES = ("not enough memory", "can't allocate memory")


class PlainStep:
    """Runs the step.

    Attributes:
        fits: the device has room for it as it is.
    """

    def __init__(self, step: Callable[[], object]) -> None:
        """Suppose that it fits."""
        self._step, self.fits = step, True

    def __call__(self) -> object:
        """Run it once."""
        with nullcontext() if self.fits else saved_away():
            return self._step()

    def settle(self, restore: Callable[[], None], say: Callable[[str], None]) -> bool:
        """Run a first step; from then on saved tensors are kept away if memory ran out.

        Args:
            restore: puts back what the step that failed has changed.
            say: is told of it.

        Returns:
            Whether there was room for it one way or the other.

        Raises:
            Exception: whatever the step raises but running out of memory.
        """
        if not runs_out_of_memory(self):
            return True
        say("the step does not fit: keeping off the device what autograd saves")
        self.fits = False
        restore()
        return not runs_out_of_memory(self)


def runs_out_of_memory(run: Callable[[], object]) -> bool:
    """Run something; whether memory ran out. What it held is given back to the device then.

    Raises:
        Exception: whatever else it raises.
    """
    try:
        run()
        return False
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # Only now are the frames gone that held the tensors of the failed step.
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return True


def is_out_of_memory(error: BaseException) -> bool:
    is_of_cpu = type(error) is RuntimeError and any(message in str(error) for message in _CPU_MESSAGES)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_of_cpu
