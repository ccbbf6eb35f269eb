"""A module around a module, for those who want checkpointing to be visible where the model is built.

Two walks over a model have to agree. What goes by ``children()`` (``train``, ``to``, sharding code that asks which modules are taken)
finds the module inside, as the wrapper's one child. What makes names goes by ``_modules`` (``state_dict``, ``load_state_dict``) or by
``named_modules`` (names of parameters and buffers), and finds the children of the module inside in its place. So no name has an
element more than without the wrapper, and modules that read older formats of their state find the version it was saved with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch import nn

from lowtide.errors import InvalidInputError
from lowtide.policy._checkpoint import checkpoint

# PyTorch's own wrapper calls it so, and its sharding code leaves this name out of names that it makes of ``named_children``.
_INSIDE = "_checkpoint_wrapped_module"
_SHARED = ("_modules", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class CheckpointWrapper(nn.Module):
    """A module whose calls are regions, as a module of its own.

    ``lowtide.apply`` needs no wrapper. This one is for code that builds a model out of wrapped blocks. Names of parameters, buffers and
    modules and the entries of ``state_dict`` are those of the module inside; its attributes are read and set, and its items are had by
    index, as if they were the wrapper's. It works inside and around DDP and fully sharded modules, but not under ``nn.DataParallel``.

    Args:
        module: what to call.
        checkpoint_fn: ``lowtide.checkpoint``, also with options as ``functools.partial(lowtide.checkpoint, policy="selective")``; or any
            function that is called as ``checkpoint_fn(module, *args, **kwargs)`` and returns what the module returns, for instance
            ``functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)``.

    Raises:
        InvalidInputError: ``module`` is no module, or ``checkpoint_fn`` cannot be called.

    >>> block = CheckpointWrapper(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    >>> [name for name, _ in nn.ModuleDict({"block": block}).named_parameters()]
    ['block.0.weight', 'block.0.bias']
    """

    _call: Callable[..., Any] | None

    def __init__(self, module: nn.Module, checkpoint_fn: Callable[..., Any] = checkpoint) -> None:
        if not isinstance(module, nn.Module):
            raise InvalidInputError(f"CheckpointWrapper needs a module, not {type(module).__name__}: use lowtide.checkpoint for a function")
        if not callable(checkpoint_fn):
            raise InvalidInputError(f"checkpoint_fn must be a function, not {type(checkpoint_fn).__name__}: pass lowtide.checkpoint, say")
        super().__init__()
        self.__dict__["_checkpoint_fn"] = checkpoint_fn
        self._hold(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module inside as a region."""
        call = self._call
        if call is None:
            call = self._call = _bind(self._checkpoint_fn, self._inside)
        return call(*args, **kwargs)

    def _hold(self, module: nn.Module) -> None:
        own = self.__dict__
        own.update({name: module.__dict__[name] for name in _SHARED})
        own.update({_INSIDE: module, "training": module.training, "_call": None})

    @property
    def _inside(self) -> nn.Module:
        module: nn.Module = self.__dict__[_INSIDE]
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or _INSIDE not in self.__dict__:  # copies and pickles ask before there is anything inside
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._inside, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == _INSIDE:  # sharding code puts its own module in the place of a child
            self._hold(value)
        elif name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._inside, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if name in self.__dict__ else delattr(self._inside, name)

    def __getitem__(self, key: Any) -> Any:
        return self._inside[key]  # type: ignore[index]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None}

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The module inside."""
        yield _INSIDE, self._inside

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The wrapper, then the module inside by the same name, and all in it; arguments are those of ``nn.Module.named_modules``."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._inside.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """``state_dict`` of the module inside; arguments are those of ``nn.Module.state_dict``."""
        return self._inside.state_dict(*args, **kwargs)

    def register_parameter(self, *args: Any, **kwargs: Any) -> None:
        """Give the module inside a parameter; arguments are those of ``nn.Module.register_parameter``."""
        self._inside.register_parameter(*args, **kwargs)

    def register_buffer(self, *args: Any, **kwargs: Any) -> None:
        """Give the module inside a buffer; arguments are those of ``nn.Module.register_buffer``."""
        self._inside.register_buffer(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        """One level of ``load_state_dict``."""
        self._inside._load_from_state_dict(*args)

    def _replicate_for_data_parallel(self) -> NoReturn:
        raise InvalidInputError("CheckpointWrapper cannot run under nn.DataParallel: use DistributedDataParallel, or lowtide.apply")


def _bind(checkpoint_fn: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """lowtide's ``checkpoint`` makes a callable; the functions of others call at once."""
    makes_callable = getattr(checkpoint_fn, "func", checkpoint_fn) is checkpoint
    return checkpoint_fn(module) if makes_callable else functools.partial(checkpoint_fn, module)
