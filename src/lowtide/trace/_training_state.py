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
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
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
    """A snapshot; ``restore`` may be called any number of times.

    Tensors are held weakly: a snapshot that kept the gradients of the last step alive would change the very peak that is to
    be traced. One that has died in between is made anew from its copy.
    """

    def __init__(self, model: nn.Module) -> None:
        """Capture the state of ``model``, of its optimizers and of the random generators."""
        self._thaw: list[Thaw] = []
        self._thaw += [_freeze_module(module) for module in model.modules()]
        self._thaw += [_freeze_gradient(parameter) for parameter in model.parameters()]
        self._thaw += [_freeze_optimizer(optimizer) for optimizer in find_optimizers(model)]
        self._thaw.append(_freeze_random_state())

    @torch.no_grad()
    def restore(self) -> None:
        """Put back everything that was captured, in the tensors that held it."""
        for thaw in self._thaw:
            thaw()


Thaw = Callable[[], Any]
"""Puts a value back as it was and returns it."""


def _freeze(value: Any) -> Thaw:
    if type(value) in (torch.Tensor, nn.Parameter):
        return _freeze_tensor(value)
    if type(value) in (list, dict, set, deque, defaultdict):
        return _freeze_container(value)
    if isinstance(value, torch.Generator):
        return partial(_thaw_by, value, value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(_thaw_by, value, value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        set_state = partial(setattr, value.bit_generator, "state")
        return partial(_thaw_by, value, set_state, copy.deepcopy(value.bit_generator.state))
    return lambda: value


def _thaw_by(value: Any, set_state: Callable[[Any], object], state: Any) -> Any:
    set_state(state)
    return value


def _freeze_tensor(tensor: torch.Tensor) -> Thaw:
    reference, kind, requires_grad, device = weakref.ref(tensor), type(tensor), tensor.requires_grad, tensor.device
    frozen = tensor.detach().to("cpu", copy=True)

    def thaw() -> torch.Tensor:
        alive = reference()
        if alive is None:
            made = frozen.to(device, copy=True)
            return nn.Parameter(made, requires_grad) if kind is nn.Parameter else made.requires_grad_(requires_grad)
        # Through .data: a restore is no event for autograd, and leaves versions alone.
        alive.data.copy_(frozen)
        if alive.is_leaf and alive.requires_grad != requires_grad:
            alive.requires_grad_(requires_grad)
        return alive

    return thaw


def _freeze_container(container: Any) -> Thaw:
    if isinstance(container, dict):
        items = {key: _freeze(item) for key, item in container.items()}
        return partial(_refill, container, container.update, lambda: {key: thaw() for key, thaw in items.items()})
    thaws = [_freeze(item) for item in container]
    fill = container.update if isinstance(container, set) else container.extend
    return partial(_refill, container, fill, lambda: [thaw() for thaw in thaws])


def _refill(container: Any, fill: Callable[[Any], object], contents: Callable[[], Any]) -> Any:
    # Contents first: the container may be all that keeps its tensors alive.
    thawed = contents()
    container.clear()
    fill(thawed)
    return container


def _freeze_module(module: nn.Module) -> Thaw:
    attributes = {name: _freeze(value) for name, value in module.__dict__.items() if name not in _OWN_ATTRIBUTES}
    tensors = [_freeze_container(module._parameters), _freeze_container(module._buffers)]

    def thaw() -> None:
        for name in [name for name in module.__dict__ if name not in _OWN_ATTRIBUTES and name not in attributes]:
            del module.__dict__[name]
        module.__dict__.update({name: thaw_value() for name, thaw_value in attributes.items()})
        for thaw_tensors in tensors:
            thaw_tensors()

    return thaw


def _freeze_gradient(parameter: nn.Parameter) -> Thaw:
    thaw_gradient = _freeze(parameter.grad)
    return lambda: setattr(parameter, "grad", thaw_gradient())


def _freeze_optimizer(optimizer: Optimizer) -> Thaw:
    groups = [{name: _freeze(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = {parameter: {name: _freeze(value) for name, value in state.items()} for parameter, state in optimizer.state.items()}

    def thaw() -> None:
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for name in set(group) - set(saved) - {"params"}:
                del group[name]
            group.update({name: thaw_value() for name, thaw_value in saved.items()})
        thawed = {parameter: {name: thaw_value() for name, thaw_value in state.items()} for parameter, state in states.items()}
        optimizer.state.clear()
        optimizer.state.update(thawed)

    return thaw


def _freeze_random_state() -> Thaw:
    python, numpy, cpu, devices = random.getstate(), np.random.get_state(), torch.get_rng_state(), _device_random_states()

    def thaw() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        for index, state in devices:
            torch.cuda.set_rng_state(state, index)

    return thaw


def random_states() -> list[torch.Tensor]:
    """The random state of torch's global generators: CPU first, then each CUDA device in use."""
    return [torch.get_rng_state(), *(state for _, state in _device_random_states())]


def _device_random_states() -> list[tuple[int, torch.Tensor]]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    return [(index, torch.cuda.get_rng_state(index)) for index in range(torch.cuda.device_count())]
