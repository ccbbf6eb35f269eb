"""Everything a step may change, taken before and put back after."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lowtide.trace._freeze import Freezer
from lowtide.trace._objects import find_optimizers
from lowtide.trace._random import random_state


class TrainingState:
    """A snapshot; ``restore`` may be called any number of times.

    What is restored: parameters, buffers, gradients, training flags and plain attributes of every module, the optimizers that hold one of
    the model's parameters, the random state of torch, Python and NumPy, and what the step can reach in the same way: other modules and
    optimizers, learning-rate schedulers, loss scalers, random generators, containers, objects of the user's classes, variables of the
    scopes around it. Copies live on the host, so that capturing does not need device memory.

    Not restored: files, containers of more than 10,000 items, tensors of more than 64 MiB that belong to no module or optimizer, and
    iterators that the step advances unless asked for.

    Args:
        model: what the step trains.
        step: the step itself, if what it can reach is to be restored as well.
        iterators: have iterators, such as that of a loader, give the same items after each ``restore``. Variables, attributes, lists and
            dictionaries that hold one then hold one that does so, and later goes on from where the step left off.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object] | None = None, *, iterators: bool = False) -> None:
        """Capture the state of ``model``, of its optimizers, of what ``step`` can reach, and of the random generators."""
        freezer = Freezer(self if iterators else None)
        freezer.freeze(model)
        for optimizer in find_optimizers(model):
            freezer.freeze(optimizer)
        freezer.freeze(step, stray=True)
        self._restore = [*freezer.restore, *random_state()]
        if freezer.iterators:
            self.restore()  # from now on they remember

    @torch.no_grad()
    def restore(self) -> None:
        """Put back everything that was captured, in the objects that held it."""
        for restore in self._restore:
            restore()
