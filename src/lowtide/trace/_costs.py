"""What an op of a fake step would cost: by a model of a GPU, or measured once per distinct op, shapes and types on this CPU.

The model is a roofline: an op takes as long as its arithmetic at the GPU's peak or its bytes at the bandwidth of its memory, whichever is
longer, at the share of these peaks that good kernels reach, and at least as long as a kernel takes to start. It knows nothing of fusion,
of caches, or of a launch-bound host; what it is good for is the ratio of one op's time to another's, by which plans are chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import flop_counter

from lowtide._torch_private import unset_fake_temporarily
from lowtide.trace._allocator import run_and_peak
from lowtide.trace._gpus import Gpu
from lowtide.trace._ops import facts_of, tensors_in

_OF_PEAK = 0.7
_OF_BANDWIDTH = 0.8
_SHORTEST_S = 2e-6
_RUNS, _LONG_S = 3, 0.05
# Their arguments hold what only the op itself can have put there.
_OPAQUE = ("mkldnn.", "mkl.", "onednn.", "c10d", "_c10d_functional")
_GUESSED_BYTES_PER_S = 1e10


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one op.

    Attributes:
        seconds: how long it takes.
        peak_bytes: the most bytes above the level at which it begins; 0 if unknown.
        returned_bytes: sizes of the storages of the tensors that it returns; empty if unknown.
    """

    seconds: float
    peak_bytes: int = 0
    returned_bytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Shape:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> _Shape:
        return _Shape(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def make(self) -> torch.Tensor:
        """A real tensor like it; integers are zero, which is an index into anything."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True)) if 0 not in self.size else 0
        floating = self.dtype.is_floating_point or self.dtype.is_complex
        values = torch.rand(extent).to(self.dtype) if floating else torch.zeros(extent, dtype=self.dtype)
        return values.as_strided(self.size, self.stride)


Spec = tuple[Any, Any, bool]
"""An operator, a description of its arguments, which can be compared and made anew, and whether gradients were recorded."""


def spec_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Spec:
    """Describe a call."""
    # Some kernels look whether gradients are recorded, and return more where they are.
    return func, _describe((args, tuple(sorted(kwargs.items())))), torch.is_grad_enabled()


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Shape.of(value)
    if isinstance(value, (tuple, list)):
        return (type(value) is list, tuple(map(_describe, value)))
    # A type beside each value: 1, 1.0 and True are equal.
    return type(value), value


def _make(described: Any) -> Any:
    if isinstance(described, _Shape):
        return described.make()
    kind, value = described
    if isinstance(kind, bool):
        parts = map(_make, value)
        return list(parts) if kind else tuple(parts)
    return value


class Costs(Protocol):
    """Knows what ops cost."""

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Spec:
        """Note a call; the result stands for it in ``cost_of``."""

    def cost_of(self, specs: Iterable[Spec]) -> list[Cost]:
        """Costs of noted calls, in order."""


class RooflineCosts:
    """By the peaks of a GPU."""

    def __init__(self, gpu: Gpu) -> None:
        """Use the peaks of ``gpu``."""
        self._gpu = gpu
        self._known: dict[Spec, Cost] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Spec:
        """Note a call."""
        spec = spec_of(func, args, kwargs)
        if spec not in self._known:
            self._known[spec] = Cost(self._seconds(func, args, kwargs, out))
        return spec

    def cost_of(self, specs: Iterable[Spec]) -> list[Cost]:
        """Costs of noted calls, in order."""
        return [self._known[spec] for spec in specs]

    def _seconds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        read, made = tensors_in((args, *kwargs.values())), tensors_in((out,))
        storages = {tensor.untyped_storage()._cdata for tensor in read}
        if not facts_of(func).written and all(tensor.untyped_storage()._cdata in storages for tensor in made):
            return 0.0
        moved = sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in (*read, *made)}.values())
        dtype = next((tensor.dtype for tensor in (*read, *made) if tensor.dtype.is_floating_point), torch.float32)
        arithmetic = _flops(func, args, kwargs, out) / (self._gpu.flops_per_s(dtype) * _OF_PEAK)
        return max(arithmetic, moved / (self._gpu.bytes_per_s * _OF_BANDWIDTH), _SHORTEST_S)


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    count = flop_counter.flop_registry.get(func._overloadpacket) or _ON_CPU.get(func)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


# Where the CPU stands in for a GPU its attention runs; it does the same arithmetic.
_ON_CPU: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}


class MeasuredCosts:
    """By running each distinct op on this CPU, once the step is over."""

    def __init__(self) -> None:
        """Nothing is measured yet."""
        self._known: dict[Spec, Cost] = {}

    def note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Spec:
        """Note a call."""
        return spec_of(func, args, kwargs)

    def cost_of(self, specs: Iterable[Spec]) -> list[Cost]:
        """Costs of noted calls, in order."""
        specs = list(specs)
        wanted = [spec for spec in dict.fromkeys(specs) if spec not in self._known]
        with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
            self._known.update({spec: _measured(spec) for spec in wanted})
        return [self._known[spec] for spec in specs]


def _measured(spec: Spec) -> Cost:
    """Shortest time of a few runs, and the sizes of what was returned; a guess for an op that does not run on any values."""
    func, described, records_gradients = spec
    with torch.set_grad_enabled(records_gradients):
        return _measured_call(func, *_make(described))


def _measured_call(func: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> Cost:
    args = _filled(func, args)
    if str(func).startswith(_OPAQUE):
        return _guessed(args, kwargs)
    # What the first run allocates is what every run does.
    first, peak = run_and_peak(lambda: _run(func, args, dict(kwargs)))
    if first is None:
        return _guessed(args, kwargs, peak)
    shortest, sizes = first
    for _ in range(_RUNS - 1 if shortest < _LONG_S else 0):
        shortest = min(shortest, (_run(func, args, dict(kwargs)) or first)[0])
    return Cost(shortest, peak, sizes)


def _guessed(args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], peak: int = 0) -> Cost:
    moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((args, *dict(kwargs).values())))
    return Cost(moved / _GUESSED_BYTES_PER_S, peak)


def _filled(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with what only another op can put there: the backward of oneDNN's recurrent layers reads what forward left."""
    if func is not torch.ops.aten.mkldnn_rnn_layer_backward.default:
        return args
    (x, *weights, h, c), (reverse, mode, size, layers, biases, train, both_ways, batch_sizes, batch_first) = args[:7], args[13:22]
    settings = (reverse, batch_sizes, mode, size, layers, biases, both_ways, batch_first, train)
    with torch.enable_grad():
        *_, workspace = torch.ops.aten.mkldnn_rnn_layer(x, *weights, h, c, *settings)
    return (*args[:22], workspace)


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, tuple[int, ...]] | None:
    start = time.perf_counter()
    try:
        out = func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):
        return None
    return time.perf_counter() - start, tuple(tensor.untyped_storage().nbytes() for tensor in tensors_in((out,)))
