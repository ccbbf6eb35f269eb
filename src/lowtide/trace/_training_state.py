"""Everything a step may change, taken before and put back after.

What is restored: parameters, buffers, gradients, training flags and plain attributes of every module,
the optimizers that hold one of the model's parameters, and the random state of torch, Python and NumPy.
Copies live on the host, so that capturing does not need device memory. What lives outside the model (a
data iterator, a learning-rate scheduler's counter) is not seen.
"""

from __future__ import annotations

import copy
import gc
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

# What nn.Module itself keeps, and the instance's forward: an installed region is no state of the step.
_OWN_ATTRIBUTES = (frozenset(nn.Module().__dict__) - {"training"}) | {"forward"}


def find_optimizers(model: nn.Module) -> list[Optimizer]:
    """The optimizers alive in this process that update a parameter of ``model``."""
    owned = {id(parameter) for parameter in model.parameters()}
    found = [candidate for candidate in gc.get_objects() if _is_optimizer(candidate)]
    return [optimizer for optimizer in found if any(id(p) in owned for group in optimizer.param_groups for p in group["params"])]


def _is_optimizer(candidate: object) -> bool:
    # By type, not isinstance: isinstance may run code of lazy objects that the collector happens to hold.
    return issubclass(type(candidate), Optimizer) and hasattr(candidate, "param_groups")


class TrainingState:
    """A snapshot; ``restore`` may be called any number of times."""

    def __init__(self, model: nn.Module) -> None:
        """Capture the state of ``model``, of its optimizers and of the random generators."""
        self._optimizers = find_optimizers(model)
        self._undo: list[Callable[[], None]] = []
        for module in model.modules():
            self._undo.append(_module_undo(module))
        for tensor in [*model.parameters(), *model.buffers()]:
            self._undo.append(_tensor_undo(tensor))
        for parameter in model.parameters():
            self._undo.append(_gradient_undo(parameter))
        for optimizer in self._optimizers:
            self._undo.append(_optimizer_undo(optimizer))
        self._undo.append(_random_undo())

    @torch.no_grad()
    def restore(self) -> None:
        """Put back everything that was captured, in the tensors that held it."""
        for undo in self._undo:
            undo()


def _tensor_undo(tensor: torch.Tensor) -> Callable[[], None]:
    saved = tensor.detach().to("cpu", copy=True)
    requires_grad = tensor.requires_grad

    def undo() -> None:
        # Through .data: a restore is no event for autograd, and leaves versions alone.
        tensor.data.copy_(saved)
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)

    return undo


def _gradient_undo(parameter: nn.Parameter) -> Callable[[], None]:
    gradient = parameter.grad
    refill = _tensor_undo(gradient) if gradient is not None else None

    def undo() -> None:
        parameter.grad = gradient
        if refill is not None:
            refill()

    return undo


def _module_undo(module: nn.Module) -> Callable[[], None]:
    names = {name: value for name, value in module.__dict__.items() if name not in _OWN_ATTRIBUTES}
    contents = [_value_undo(value) for value in names.values()]
    buffers = dict(module._buffers)

    def undo() -> None:
        for name in [name for name in module.__dict__ if name not in _OWN_ATTRIBUTES and name not in names]:
            del module.__dict__[name]
        module.__dict__.update(names)
        module._buffers.clear()
        module._buffers.update(buffers)
        for refill in contents:
            refill()

    return undo


def _value_undo(value: Any) -> Callable[[], None]:
    if isinstance(value, torch.Tensor):
        return _tensor_undo(value) if type(value) in (torch.Tensor, nn.Parameter) else _nothing
    if isinstance(value, torch.Generator):
        return partial(_set_generator, value, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", copy.deepcopy(value.bit_generator.state))
    if type(value) in (list, dict, set, deque):
        return _container_undo(value)
    return _nothing


def _set_generator(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _container_undo(container: Any) -> Callable[[], None]:
    items = container.copy()
    inner = [_value_undo(item) for item in (items.values() if isinstance(items, dict) else items)]

    def undo() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(items)
        for refill in inner:
            refill()

    return undo


def _nothing() -> None:
    """There is nothing to undo."""


def _optimizer_undo(optimizer: Optimizer) -> Callable[[], None]:
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    contents = [_value_undo(value) for state in states.values() for value in state.values()]
    contents += [_value_undo(value) for group in groups for value in group.values()]

    def undo() -> None:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for name in set(group) - set(saved) - {"params"}:
                del group[name]
            group.update(saved)
        optimizer.state.clear()
        optimizer.state.update({parameter: dict(state) for parameter, state in states.items()})
        for refill in contents:
            refill()

    return undo


def _random_undo() -> Callable[[], None]:
    python, numpy, cpu, devices = random.getstate(), np.random.get_state(), torch.get_rng_state(), _device_random_states()

    def undo() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for index, state in devices:
            torch.cuda.set_rng_state(state, index)

    return undo


def random_states() -> list[torch.Tensor]:
    """The random state of torch's global generators: CPU first, then each CUDA device in use."""
    return [torch.get_rng_state(), *(state for _, state in _device_random_states())]


def _device_random_states() -> Iterable[tuple[int, torch.Tensor]]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [(index, torch.cuda.get_rng_state(index)) for index in range(torch.cuda.device_count())]
