"""Everything a step may change, taken before and put back after."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

from lowtide.trace._freeze import Freezer
from lowtide.trace._objects import find_optimizers


class TrainingState:
    """A snapshot; ``restore`` may be called any number of times.

    What is restored: parameters, buffers, gradients, training flags and plain attributes of every module, the optimizers that hold one of
    the model's parameters, the random state of torch, Python and NumPy, and what the step can reach in the same way: other modules and
    optimizers, learning-rate schedulers, loss scalers, random generators, containers, objects of the user's classes, variables of the
    scopes around it. Copies live on the host, so that capturing does not need device memory.

    Not restored: iterators that the step advances, files, containers of more than 10,000 items, and tensors of more than 64 MiB that belong
    to no module or optimizer.

    Args:
        model: what the step trains.
        step: the step itself, if what it can reach is to be restored as well.
    """

    def __init__(self, model: nn.Module, step: Callable[[], object] | None = None) -> None:
        """Capture the state of ``model``, of its optimizers, of what ``step`` can reach, and of the random generators."""
        freezer = Freezer()
        freezer.freeze(model)
        for optimizer in find_optimizers(model):
            freezer.freeze(optimizer)
        freezer.freeze(step, stray=True)
        self._restore = [*freezer.restore, *_random_state()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put back everything that was captured, in the objects that held it."""
        for restore in self._restore:
            restore()


def _random_state() -> list[Callable[[], object]]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = [(index, state) for index, state in enumerate(_device_random_states())]
    return [
        lambda: random.setstate(python),
        lambda: np.random.set_state(numpy),
        lambda: torch.set_rng_state(cpu),
        *(partial(torch.cuda.set_rng_state, state, index) for index, state in devices),
    ]


def random_states() -> list[torch.Tensor]:
    """The random state of torch's global generators: CPU first, then each CUDA device in use."""
    return [torch.get_rng_state(), *_device_random_states()]


def _device_random_states() -> list[torch.Tensor]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
