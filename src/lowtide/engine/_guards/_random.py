"""The state of torch's own random generators, on the CPU and on every accelerator.

The CPU generator is copied whole, straight from its memory and into bytes, for tensors are counted: so short a copy that every call
can have one, and be compared with another when it is over. A CUDA generator is a seed and an offset: two numbers, read without
touching the device.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lowtide import _torch_private as private
from lowtide.errors import ReplayError

PYTHON: random.Random = random.getstate.__self__  # type: ignore[attr-defined]
NUMPY: np.random.RandomState = np.random.get_state.__self__  # type: ignore[attr-defined]

# state of the CPU generator, states of the devices
Random = tuple[bytes, list[Any]]


def _meaning(state: bytes) -> tuple[bytes, ...]:
    """The memory of a CPU generator without what is left of samples that were used, and without the gaps."""
    samples = state[-24:]
    return state[:13], state[16:-28], samples[:4] if samples[4] else b"", samples[8:16] if samples[16] else b""


def _window_on(generator: torch.Generator) -> Any:
    """The memory of a CPU generator, if that does what it is for: tried on one of our own, with single numbers, samples and full rounds."""
    window = private.engine_memory(generator)
    if window is None:
        return None
    draws: list[Callable[[], torch.Tensor]] = [
        *(lambda: torch.rand(1, generator=generator), lambda: torch.rand(624, generator=generator)),
        *[lambda: torch.randn(1, generator=generator), lambda: torch.randn(1, generator=generator, dtype=torch.float64)] * 2,
    ]
    for draw in draws:
        before = window.raw
        drawn, after = draw(), window.raw
        window.raw = before
        if _meaning(after) == _meaning(before) or not torch.equal(draw(), drawn) or _meaning(window.raw) != _meaning(after):
            return None
    return window


_own = torch.Generator()
_own_window = _window_on(_own)
_window: Any = None if _own_window is None else private.engine_memory(torch.default_generator)
_get = torch.default_generator.get_state
_SIZE = _get().nbytes
_at = (ctypes.c_char * _SIZE).from_address
_one_at_a_time = threading.Lock()


def memory_of_cpu() -> tuple[int, int] | None:
    """Where the state of the CPU generator is in memory, and of how many bytes it is; ``None`` if it has to be asked for."""
    return None if _window is None else (ctypes.addressof(_window), ctypes.sizeof(_window))


def take_cpu() -> bytes:
    """Read the state of the CPU generator."""
    if _window is not None:
        state: bytes = _window.raw
        return state
    tensor = _get()
    return _at(tensor.data_ptr()).raw


def _put_cpu(state: bytes) -> None:
    """Set the state of the CPU generator; by its own method where another thread may be drawing from it, which waits for that."""
    if _window is None:
        tensor = _get()
        ctypes.memmove(tensor.data_ptr(), state, _SIZE)
        torch.default_generator.set_state(tensor)
    elif threading.active_count() == 1:
        _window.raw = state
    else:
        with _one_at_a_time:
            _own_window.raw = state
            torch.default_generator.set_state(_own.get_state())


def take_random() -> Random:
    """Read the state of every default generator that is in use."""
    return take_cpu(), NO_DEVICES if ONLY_CPU else _take_devices()


def moved(since: Random) -> bool:
    """Whether somebody drew from a default generator."""
    return cpu_moved(since[0]) or (bool(since[1]) and not all(map(_same, since[1], _take_devices())))


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one[1], other[1]) if isinstance(one[1], torch.Tensor) else bool(one[1] == other[1])


def cpu_moved(since: bytes) -> bool:
    """Whether the state of the CPU generator is another one by now."""
    now = take_cpu()
    return now != since and (_window is None or _meaning(now) != _meaning(since))


def put_random(wanted: Random) -> None:
    """Set the state of every default generator."""
    _put_cpu(wanted[0])
    for put, device_state in wanted[1]:
        put(device_state)


def _take_devices() -> list[Any]:
    taken: list[Any] = []
    if not _has_cuda() and _other() is None:
        ONLY_CPU.append(True)
        return taken
    if _has_cuda() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        if torch.cuda.is_current_stream_capturing():
            raise ReplayError(
                "a region is captured in a CUDA graph, where the state of a generator can be neither read nor set for its replay: let "
                "torch.compile(model, mode='reduce-overhead') capture the step, where regions are the compiler's, or capture without them"
            )
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


NO_DEVICES: list[Any] = []
ONLY_CPU: list[bool] = []
"""Not empty once it is known that there is no accelerator."""
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
