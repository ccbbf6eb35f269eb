"""What it takes to run an op of a graph once more, and to write a value that the compiler would else only pass on.

Ops that the compiler does not make itself (products, convolutions, attention) are run on values of the same shapes, each distinct one once.
Those that it makes loops of are counted by what they compute and move: alone they would take longer than inside a loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

from lowtide.compiled import _torch_partitioner as torch_partitioner

_ELEMENT_S = {"cpu": 5e-11, "cuda": 1e-13}
_DEAR_ELEMENT_S = {"cpu": 3e-10, "cuda": 5e-13}
"""An element of a loop on one core or one GPU, and one that needs a series: an exponential, say."""
_DEAR = ("exp", "erf", "tanh", "sigmoid", "log", "pow", "gelu", "silu", "softmax", "sin", "cos", "random", "mish", "sqrt")
_MASK_ELEMENT_S = {"cpu": 1.1e-8}
"""To write and read an element of a mask. On a CPU inductor has no vectors of truth values: a loop that writes or reads one takes ten
times as long as one that does not (with PyTorch 2.13, 13 ms against 0.2 ms to write 1.6 million, 5 ms against 0.3 ms to read them)."""
_PROBE_BYTES = 2**27  # more than caches hold
_RUNS = 3


class Costs:
    """Seconds of the ops of one graph."""

    def __init__(self) -> None:
        """Nothing has been measured yet."""
        self._known: dict[str, float] = {}

    def replay_s(self, node: fx.Node) -> float:
        """To run a node again, and to write its result where what reads it is no loop."""
        sample = _first_tensor(node.meta.get("val"))
        if sample is None or not isinstance(node.target, torch._ops.OpOverload):
            return 0.0
        if torch_partitioner.op_types.is_fusible(node):
            in_a_loop = all(torch_partitioner.op_types.is_fusible(user) for user in node.users)
            return _loop_s(node, sample) + (0.0 if in_a_loop else write_s(sample))
        key = f"{node.target} {tree_map(_told, (node.args, node.kwargs))}"
        if key not in self._known:
            self._known[key] = _measured_s(node, sample.device)
        return self._known[key]

    def save_s(self, node: fx.Node) -> float:
        """To write a value for backward; 0 where it is written anyway."""
        sample = node.meta.get("val")
        if not isinstance(sample, torch.Tensor) or node.op == "placeholder":
            return 0.0
        loop = torch_partitioner.op_types.is_fusible
        if sample.dtype == torch.bool and sample.device.type in _MASK_ELEMENT_S:
            return _elements(sample) * _MASK_ELEMENT_S[sample.device.type]
        return write_s(sample) if loop(node) and all(loop(user) for user in node.users) else 0.0


def write_s(tensor: torch.Tensor) -> float:
    """To write a tensor to memory and read it again."""
    return _bytes(tensor) / bandwidth(tensor.device)


@cache
def bandwidth(device: torch.device) -> float:
    """Bytes a second that an elementwise op on a device reads and writes."""
    with unset_fake_temporarily(), no_dispatch():
        probe = torch.zeros(_PROBE_BYTES // 4, device=device)
        return 2 * _PROBE_BYTES / seconds(lambda: torch.add(probe, 1.0, out=probe), device)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The shortest of a few runs."""
    times = []
    for _ in range(_RUNS + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _loop_s(node: fx.Node, sample: torch.Tensor) -> float:
    dear = any(part in str(node.target) for part in _DEAR)
    table = _DEAR_ELEMENT_S if dear else _ELEMENT_S
    read = max((_elements(_first_tensor(i.meta.get("val"))) for i in node.all_input_nodes), default=0)
    return max(_elements(sample), read) * table.get(sample.device.type, table["cuda"])


def _measured_s(node: fx.Node, device: torch.device) -> float:
    """Of one run; where an op cannot be run on made-up values, as long as it takes to move what it reads and writes."""
    with unset_fake_temporarily(), no_dispatch(), torch.no_grad():
        try:
            args, kwargs = tree_map(_made_up, (node.args, node.kwargs))
            target: Any = node.target
            return seconds(lambda: target(*args, **kwargs), device)
        except Exception:  # what made-up values do to an op of anybody's cannot be known
            values = [i.meta.get("val") for i in (*node.all_input_nodes, node)]
            return sum(_bytes(t) for t in map(_first_tensor, values) if t is not None) / bandwidth(device)


def _made_up(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    meta = value.meta["val"]
    if isinstance(meta, torch.Tensor):
        shape, stride = ([torch_partitioner.hint(s) for s in sizes] for sizes in (meta.shape, meta.stride()))
        made = torch.empty_strided(shape, stride, dtype=meta.dtype, device=meta.device)
        return made.fill_(0.5) if meta.dtype.is_floating_point else made.zero_()
    return torch_partitioner.hint(meta) if isinstance(meta, torch.SymInt) else meta


def _told(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    meta = value.meta.get("val")
    return f"{meta.dtype}{tuple(meta.shape)}{meta.stride()}" if isinstance(meta, torch.Tensor) else str(meta)


def _first_tensor(value: Any) -> torch.Tensor | None:
    values = value if isinstance(value, (tuple, list)) else [value]
    return next((each for each in values if isinstance(each, torch.Tensor)), None)


def _elements(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else torch_partitioner.hint(tensor.numel())


def _bytes(tensor: torch.Tensor) -> int:
    return _elements(tensor) * tensor.dtype.itemsize
