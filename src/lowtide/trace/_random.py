"""The random state of this process: of torch's global generators, Python's and NumPy's."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch


def random_state() -> list[Callable[[], object]]:
    """What puts the random state back to what it is now."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = [(index, state) for index, state in enumerate(_device_random_states())]
    return [
        lambda: random.setstate(python),
        lambda: np.random.set_state(numpy),
        lambda: torch.set_rng_state(cpu),
        *(partial(torch.cuda.set_rng_state, state, index) for index, state in devices),
    ]


def random_bytes() -> bytes:
    """The random state as a value that can be compared."""
    return pickle.dumps((random.getstate(), np.random.get_state(), [state.numpy().tobytes() for state in random_states()]))


def random_states() -> list[torch.Tensor]:
    """The random state of torch's global generators: CPU first, then each CUDA device in use."""
    return [torch.get_rng_state(), *_device_random_states()]


def _device_random_states() -> list[torch.Tensor]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [torch.cuda.get_rng_state(index) for index in range(torch.cuda.device_count())]
