"""Values as they are now, so that they can be put back: what a step can reach and may change.

What has an identity (modules, containers, optimizers, generators, ordinary objects) is put back in place, and each of them once, however
many ways lead to it. Tensors are held weakly: a snapshot that kept the gradients of the last step alive would change the very peak that is
to be traced. One that has died in between is made anew from its copy on the host.
"""

from __future__ import annotations

import copy
import dis
import os
import random
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.trace._again import Again, can_be_drawn_from
from lowtide.trace._storages import is_made_of_others

Thaw = Callable[[], Any]
"""Gives a value as it was."""

# What nn.Module itself keeps, and the instance's forward: an installed region is no state of the step, nor is what it is compiled to.
_OWN_ATTRIBUTES = (frozenset(nn.Module().__dict__) - {"training"}) | {"forward", "_compiled_call_impl"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_HOOKS: list[dict[int, Any]] = [{} for _ in _HOOKS]
_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict)
_MOST_ITEMS = 10_000
_MOST_STRAYS = 20_000
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})
_LARGEST_STRAY_BYTES = 64 * 2**20
_STATEFUL = ("torch.optim.", "torch.amp.", "torch.cuda.amp.")
_LIBRARY_FOLDERS = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"), os.path.dirname(os.path.dirname(__file__)))


class Freezer:
    """Takes values down.

    Args:
        rewind_for: the snapshot for which iterators are to be rewound; without, they are no part of it.

    Attributes:
        restore: what to call to put everything back in place.
        iterators: those found.
    """

    def __init__(self, rewind_for: object = None) -> None:
        """Nothing is taken down yet."""
        self.restore: list[Callable[[], object]] = []
        self.iterators: list[Again] = []
        self._rewind_for = rewind_for
        self._known: dict[int, Thaw] = {}
        self._strays = 0

    def freeze(self, value: Any, *, stray: bool = False) -> Thaw:
        """Take a value down.

        Args:
            value: anything.
            stray: it is no part of the model or of an optimizer: a large tensor (data, mostly) is not copied then.
        """
        known = self._known.get(id(value))
        if known is not None:
            return known
        if isinstance(value, torch.Tensor):
            return self._tensor(value, stray)
        if self._rewind_for is not None and can_be_drawn_from(value) and not _is_ordinary(type(value)):  # type: ignore[arg-type]
            return self._iterator(value)
        as_it_is = partial(_same, value)
        taker = None if type(value) in _PLAIN else self._taker(value)
        if taker is None or (stray and self._strays >= _MOST_STRAYS):
            return as_it_is
        self._strays += stray
        self._known[id(value)] = as_it_is
        taker(value, stray)
        return as_it_is

    def _taker(self, value: Any) -> Callable[[Any, bool], None] | None:
        kind = type(value)
        if kind in _CONTAINERS:
            return self._container if len(value) <= _MOST_ITEMS else None
        if isinstance(value, tuple):
            return self.freeze_all
        if isinstance(value, nn.Module):
            return self._modules
        if isinstance(value, Optimizer):
            return self._optimizer
        if isinstance(value, (torch.Generator, random.Random, np.random.Generator)):
            return self._generator
        return _code_taker(self, value) or (self._object if _is_ordinary(kind) else None)  # type: ignore[arg-type]

    def _tensor(self, tensor: torch.Tensor, stray: bool) -> Thaw:
        if is_made_of_others(type(tensor)):
            names, about = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            parts = {name: self.freeze(getattr(tensor, name), stray=stray) for name in names}
            self._known[id(tensor)] = whole = _FrozenWhole(tensor, parts, about)
            self.restore.append(whole.refill)
            return whole
        plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
        if not plain or (stray and tensor.numel() * tensor.element_size() > _LARGEST_STRAY_BYTES):
            return partial(_same, tensor)
        self._known[id(tensor)] = thaw = _FrozenTensor(tensor)
        self.restore.append(thaw.refill)
        return thaw

    def _iterator(self, value: Iterator[Any]) -> Thaw:
        again = Again(value, self._rewind_for)
        self.iterators.append(again)
        self._known[id(value)] = again.rewound
        return again.rewound

    def _container(self, container: Any, stray: bool) -> None:
        if not container:
            self.restore.append(container.clear)
            return
        if isinstance(container, dict):
            items = {key: self.freeze(item, stray=stray) for key, item in container.items()}
            self.restore.append(partial(_refill, container, container.update, lambda: {key: thaw() for key, thaw in items.items()}))
            return
        thaws = [self.freeze(item, stray=stray) for item in container]
        fill = container.update if isinstance(container, set) else container.extend
        self.restore.append(partial(_refill, container, fill, lambda: [thaw() for thaw in thaws]))

    def freeze_all(self, items: tuple[Any, ...], stray: bool) -> None:
        """Take down each of several values."""
        for item in items:
            self.freeze(item, stray=stray)

    def _modules(self, root: nn.Module, stray: bool) -> None:
        for module in root.modules():
            self._known[id(module)] = partial(_same, module)
        for module in root.modules():
            self._module(module)

    def _module(self, module: nn.Module) -> None:
        own = {name: value for name, value in module.__dict__.items() if name not in _OWN_ATTRIBUTES}
        plain = {name: value for name, value in own.items() if type(value) in _PLAIN}
        frozen = {name: self.freeze(value) for name, value in own.items() if name not in plain}
        self.restore.append(partial(_restore_attributes, module.__dict__, plain, frozen, _OWN_ATTRIBUTES))
        hooks = [getattr(module, name) for name in _HOOKS]
        self.restore.append(partial(_restore_hooks, hooks, [dict(table) for table in hooks] if any(hooks) else _NO_HOOKS))
        for parameter in module.parameters(recurse=False):
            self.restore.append(partial(_restore_gradient, parameter, self.freeze(parameter.grad)))
        for tensors in (module._parameters, module._buffers):
            # A ScriptModule keeps its own in C++, as no dictionary: their contents are taken, their names cannot change.
            if type(tensors) in _CONTAINERS:
                self.freeze(tensors)
            else:
                for tensor in tensors.values():
                    self.freeze(tensor)

    def _optimizer(self, optimizer: Optimizer, stray: bool) -> None:
        groups = [{name: self.freeze(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        states = {parameter: {name: self.freeze(value) for name, value in state.items()} for parameter, state in optimizer.state.items()}
        self.restore.append(partial(_restore_optimizer, optimizer, groups, states))

    def _generator(self, generator: Any, stray: bool) -> None:
        if isinstance(generator, torch.Generator):
            self.restore.append(partial(generator.set_state, generator.get_state()))
        elif isinstance(generator, random.SystemRandom):
            return  # it has no state
        elif isinstance(generator, random.Random):
            self.restore.append(partial(generator.setstate, generator.getstate()))
        else:
            bits = generator.bit_generator
            self.restore.append(partial(setattr, bits, "state", copy.deepcopy(bits.state)))

    def _object(self, value: Any, stray: bool) -> None:
        attributes = {name: self.freeze(attribute, stray=True) for name, attribute in value.__dict__.items()}
        self.restore.append(partial(_restore_attributes, value.__dict__, {}, attributes, frozenset()))

    def take_function(self, function: types.FunctionType, stray: bool) -> None:
        """What a function can reach: its closure, its defaults, and the globals that it names."""
        for cell in function.__closure__ or ():
            try:
                content = self.freeze(cell.cell_contents, stray=True)
            except ValueError:  # a variable of the scope around that is not assigned yet
                continue
            self.restore.append(partial(_restore_cell, cell, content))
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.freeze(default, stray=True)
        for name in _names(function.__code__, None) & function.__globals__.keys():
            thaw = self.freeze(function.__globals__[name], stray=True)
            if _is_rewound(thaw) or name in _names(function.__code__, "STORE_GLOBAL"):
                self.restore.append(partial(_restore_global, function.__globals__, name, thaw))


def _code_taker(freezer: Freezer, value: Any) -> Callable[[Any, bool], None] | None:
    if isinstance(value, types.FunctionType):
        return freezer.take_function if _is_users(value) else None
    if isinstance(value, types.MethodType):
        return lambda method, stray: freezer.freeze_all((method.__self__, method.__func__), stray)
    if isinstance(value, partial):
        return lambda bound, stray: freezer.freeze_all((bound.func, *bound.args, *bound.keywords.values()), stray)
    return None


class _FrozenTensor:
    """A tensor, held weakly, and a copy of it on the host."""

    __slots__ = ("_alive", "_copy", "_device", "_parameter", "_requires_grad")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alive = weakref.ref(tensor)
        # To clone takes half the time of to(copy=True).
        self._copy = tensor.detach().clone() if tensor.is_cpu else tensor.detach().cpu()
        self._device, self._requires_grad, self._parameter = tensor.device, tensor.requires_grad, type(tensor) is nn.Parameter

    def __call__(self) -> torch.Tensor:
        """The tensor; made anew if it has died."""
        alive = self._alive()
        if alive is None:
            made = self._copy.to(self._device, copy=True)
            alive = nn.Parameter(made, self._requires_grad) if self._parameter else made.requires_grad_(self._requires_grad)
            self._alive = weakref.ref(alive)
        return alive

    def refill(self) -> None:
        """Put the values back, if it is alive."""
        alive = self._alive()
        if alive is None:
            return
        # Through .data: a restore is no event for autograd, and leaves versions alone.
        alive.data.copy_(self._copy)
        if alive.is_leaf and alive.requires_grad != self._requires_grad:
            alive.requires_grad_(self._requires_grad)


class _FrozenWhole:
    """A tensor that is made of others, such as one spread over processes, held weakly; what it is made of is taken down by itself."""

    __slots__ = ("_about", "_alive", "_kind", "_parts", "_requires_grad", "_shape")

    def __init__(self, tensor: torch.Tensor, parts: dict[str, Thaw], about: Any) -> None:
        self._alive, self._kind, self._parts, self._about = weakref.ref(tensor), type(tensor), parts, about
        self._shape, self._requires_grad = (tensor.size(), tensor.stride()), tensor.requires_grad

    def __call__(self) -> torch.Tensor:
        """The tensor; made anew if it has died."""
        alive = self._alive()
        if alive is None:
            parts = {name: thaw() for name, thaw in self._parts.items()}
            alive = self._kind.__tensor_unflatten__(parts, self._about, *self._shape).requires_grad_(self._requires_grad)  # type: ignore[attr-defined]
            self._alive = weakref.ref(alive)
        return alive

    def refill(self) -> None:
        """The parts are refilled by themselves."""
        alive = self._alive()
        if alive is not None and alive.is_leaf and alive.requires_grad != self._requires_grad:
            alive.requires_grad_(self._requires_grad)


def _is_rewound(thaw: Thaw) -> bool:
    return isinstance(getattr(thaw, "__self__", None), Again)


def _same(value: Any) -> Any:
    return value


def _refill(container: Any, fill: Callable[[Any], object], contents: Callable[[], Any]) -> None:
    # Contents first: the container may be all that keeps its tensors alive.
    thawed = contents()
    container.clear()
    fill(thawed)


def _restore_attributes(attributes: dict[str, Any], plain: dict[str, Any], frozen: dict[str, Thaw], others: frozenset[str]) -> None:
    for name in [name for name in attributes if name not in others and name not in plain and name not in frozen]:
        del attributes[name]
    attributes.update(plain)
    attributes.update({name: thaw() for name, thaw in frozen.items()})


def _restore_hooks(tables: list[dict[int, Any]], befores: list[dict[int, Any]]) -> None:
    """A model that puts hooks on its modules in its first step would do so again: it has forgotten that it did."""
    for hooks, before in zip(tables, befores, strict=True):
        if hooks or before:
            _restore_table_of_hooks(hooks, before)


def _restore_table_of_hooks(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    ours = {key: hook for key, hook in hooks.items() if key not in before and type(hook).__module__.startswith("lowtide.")}
    if hooks.keys() != before.keys() | ours.keys():
        hooks.clear()
        hooks.update({**before, **ours})


def _restore_gradient(parameter: nn.Parameter, thaw: Thaw) -> None:
    parameter.grad = thaw()


def _restore_optimizer(optimizer: Optimizer, groups: list[dict[str, Thaw]], states: dict[Any, dict[str, Thaw]]) -> None:
    for group, frozen in zip(optimizer.param_groups, groups, strict=True):
        _restore_attributes(group, {}, frozen, frozenset({"params"}))
    thawed = {parameter: {name: thaw() for name, thaw in state.items()} for parameter, state in states.items()}
    optimizer.state.clear()
    optimizer.state.update(thawed)


def _restore_cell(cell: types.CellType, thaw: Thaw) -> None:
    cell.cell_contents = thaw()


def _restore_global(names: dict[str, Any], name: str, thaw: Thaw) -> None:
    names[name] = thaw()


def _names(code: types.CodeType, operation: str | None) -> set[str]:
    """Global names in a function and the functions inside it: all, or those of one operation."""
    found = set(code.co_names) if operation is None else {i.argval for i in dis.get_instructions(code) if i.opname == operation}
    return found.union(*(_names(inner, operation) for inner in _inner(code)))


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _is_users(function: types.FunctionType) -> bool:
    return not any(folder in function.__code__.co_filename for folder in _LIBRARY_FOLDERS)


@cache
def _is_ordinary(kind: type) -> bool:
    """Whether objects of this type are data made of attributes: of the user's own classes, or schedulers and scalers."""
    if kind.__dictoffset__ == 0 or issubclass(kind, (type, BaseException, types.ModuleType, types.FunctionType)):
        return False
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_library = kind.__module__ == "builtins" or any(folder in (file or "") for folder in _LIBRARY_FOLDERS)
    return not is_library or kind.__module__.startswith(_STATEFUL)
