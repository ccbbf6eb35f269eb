"""What a step leaves behind, taken down to the last bit."""

from __future__ import annotations

import dataclasses
import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lowtide import _torch_private as private
from lowtide.engine import in_replay
from lowtide.engine._tree import tensors_in
from lowtide.errors import InvalidInputError
from lowtide.trace import random_states


def observe(model: nn.Module, step: Callable[[], object], optimizers: list[Optimizer]) -> dict[str, torch.Tensor]:
    """Run a step and copy everything that it computed, by name, to the host.

    Gradients are taken as they are accumulated, so that a step that clears them at its end shows them too.
    Names: ``loss`` (what the step returned), ``output …`` (what the model returned), ``gradient of …``, ``left gradient of …`` (what is in
    ``grad`` at the end), ``parameter …``, ``buffer …``, ``optimizer state …`` and ``random state …``.
    """
    seen: dict[str, torch.Tensor] = {}
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(_copy_gradient(name, seen)) for name, p in trained]  # type: ignore[no-untyped-call]
    hooks.append(register_module_forward_hook(_copy_outputs(model, seen)))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
            returned = step()
    finally:
        for hook in hooks:
            hook.remove()
    return {**_returned(returned), **seen, **_left(trained, seen), **_state(model, optimizers)}


def _copy_gradient(name: str, seen: dict[str, torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def copy(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            seen[f"gradient of {name}"] = _copied(parameter.grad)

    return copy


def _copy_outputs(model: nn.Module, seen: dict[str, torch.Tensor]) -> Callable[..., None]:
    """A hook for all modules, so that none is put on the model: a region sees whether its modules have hooks."""
    calls, inner = 0, 0

    def copy(module: nn.Module, _args: Any, result: Any) -> None:
        nonlocal calls, inner
        if torch.compiler.is_compiling():
            return  # nothing of this is for a graph: what a compiled model returns is seen at the module around it
        around = getattr(module, "_orig_mod", None) is model and id(result) != inner
        if (module is model or around) and not in_replay() and not private.in_backward():
            calls, inner = calls + 1, id(result)
            which = f" of call {calls}" if calls > 1 else ""
            seen.update({f"output {index}{which}": _copied(tensor) for index, tensor in enumerate(_tensors(result))})

    return copy


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors in what the user's code returned, in a fixed order; dataclasses are containers too."""
    try:
        return tensors_in(value)
    except InvalidInputError:  # with an iterator in it, which is not ours to advance
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _left(trained: list[tuple[str, nn.Parameter]], seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients that the step leaves behind: what was accumulated, or that averaged over processes, clipped, or zeroed."""
    left = {name: _copied(parameter.grad) for name, parameter in trained if parameter.grad is not None}
    accumulated = {name: seen.get(f"gradient of {name}") for name in left}
    return {f"left gradient of {name}": _one_of_both(grad, accumulated[name]) for name, grad in left.items()}


def _one_of_both(tensor: torch.Tensor, same: torch.Tensor | None) -> torch.Tensor:
    """Of two equal tensors the second, so that memory is taken once."""
    return same if same is not None and same_bits(tensor, same) else tensor


def _returned(returned: object) -> dict[str, torch.Tensor]:
    leaves = [*_tensors(returned), *map(torch.as_tensor, _numbers(returned))]
    return {"loss" if len(leaves) == 1 else f"result {index}": _copied(leaf) for index, leaf in enumerate(leaves)}


def _numbers(value: object) -> Iterator[float | complex]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, (float, int, complex)):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _numbers([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])


def _state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {f"parameter {name}": tensor for name, tensor in model.named_parameters()}
    state |= {f"buffer {name}": tensor for name, tensor in model.named_buffers()}
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, values in optimizer.state.items():
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    state[f"optimizer state {key} of {names.get(parameter, '?')}"] = value
    state |= {f"random state {index}": tensor for index, tensor in enumerate(random_states())}
    state |= {"random state of Python": _bytes_of(random.getstate()), "random state of NumPy": _bytes_of(np.random.get_state())}
    return {name: _copied(tensor) for name, tensor in state.items()}


def _bytes_of(state: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; of a tensor spread over processes what is here, of one in a function transform all its values."""
    plain = _unwrapped(tensor).detach()
    here = getattr(plain, "to_local", plain.detach)()
    return _unwrapped(here.to("cpu", copy=True))


def _unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    while private.is_functorch_wrapped(tensor):
        tensor = private.functorch_unwrapped(tensor)
    return tensor


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two host tensors hold the same values to the last bit (NaNs compare by their bits)."""
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    if first.layout != torch.strided:
        return torch.equal(first.to_dense(), second.to_dense())
    return torch.equal(_bits(first), _bits(second))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
