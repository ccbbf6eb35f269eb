"""The state of torch's own random generators, on the CPU and on every accelerator.

The CPU generator is copied whole in a microsecond, so it always is; not into a tensor, for those are counted.
A CUDA generator is a seed and an offset: two numbers, read without touching the device.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
NUMPY: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]

_clone = torch.default_generator.clone_state

Random = tuple[torch.Generator, list[Any]]


def take_random() -> Random:
    """Read the state of every default generator that is in use."""
    return _clone(), [] if _KNOWN == [None] and _CUDA == [False] else _take_devices()


def moved(since: Random) -> bool:
    """Whether somebody drew from a default generator."""
    return cpu_moved(since[0]) or (bool(since[1]) and not all(map(_same, since[1], _take_devices())))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one[1], other[1]) if isinstance(one[1], torch.Tensor) else bool(one[1] == other[1])


def cpu_moved(since: torch.Generator) -> bool:
    """Whether the state of the CPU generator is another one by now."""
    return not torch.equal(torch.default_generator.get_state(), since.get_state())


def put_random(wanted: Random | None) -> None:
    """Set the state of every default generator; of none if there is nothing to set."""
    if wanted is None:
        return
    torch.default_generator.set_state(wanted[0].get_state())
    for put, state in wanted[1]:
        put(state)


def _take_devices() -> list[Any]:
    taken: list[Any] = []
    if _has_cuda() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        taken += [(_Philox(g), (g.initial_seed(), g.get_offset())) for g in torch.cuda.default_generators]
    elif _other() is not None:
        module = _other()
        taken += [(_Setter(module, index), module.get_rng_state(index)) for index in range(module.device_count())]
    return taken


class _Philox:
    """Sets seed and offset of one CUDA generator."""

    __slots__ = ("generator",)

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __call__(self, state: tuple[int, int]) -> None:
        seed, offset = state
        if self.generator.initial_seed() != seed:
            self.generator.manual_seed(seed)
        self.generator.set_offset(offset)


class _Setter:
    """Sets the state of one device of another kind."""

    __slots__ = ("index", "module")

    def __init__(self, module: Any, index: int) -> None:
        self.module, self.index = module, index

    def __call__(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state, self.index)


_KNOWN: list[Any] = []
_CUDA: list[bool] = []


def _has_cuda() -> bool:
    if not _CUDA:
        _CUDA.append(bool(torch.backends.cuda.is_built()))  # type: ignore[no-untyped-call]
    return _CUDA[0]


def _other() -> Any:
    """The module of an accelerator that is neither CUDA nor absent, ``torch.xpu`` for one; ``None`` without."""
    if not _KNOWN:
        accelerator = torch.accelerator.current_accelerator()
        kind = "" if accelerator is None else accelerator.type
        _KNOWN.append(None if kind in ("", "cuda") else _Mps() if kind == "mps" else torch.get_device_module(accelerator))
    return _KNOWN[0]


class _Mps:
    """``torch.mps`` has one device and takes no index."""

    def device_count(self) -> int:
        return 1

    def get_rng_state(self, index: int) -> torch.Tensor:
        return torch.mps.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        torch.mps.set_rng_state(state)
