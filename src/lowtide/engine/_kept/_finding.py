"""Finding the kept calls while a region runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from lowtide import _torch_private as private
from lowtide.engine._kept._between import Between
from lowtide.engine._kept._origins import tensors_of
from lowtide.engine._tree import ATOMS, tensors_in
from lowtide.errors import InvalidInputError

if TYPE_CHECKING:
    from lowtide.engine._kept._learned import Choice

Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
Key = tuple[Any, int]
_NO_KWARGS: dict[str, Any] = {}


class Finder(Between):
    """Counts calls, by function and by module, and hands over those that are kept.

    Attributes:
        choice: which calls are kept.
        calls: how often each function that is ever kept was called so far, and each module, by its ``id``.
    """

    def __init__(self, choice: Choice, pack: Pack) -> None:
        self.choice = choice
        self.calls = dict.fromkeys(choice.indices, 0)
        self._indices = choice.indices
        self._pack = pack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = self._indices.get(func)
        if indices is None:
            return func(*args) if kwargs is None else func(*args, **kwargs)
        index = self.calls[func]
        self.calls[func] = index + 1
        kwargs = kwargs or {}
        hooks = private.top_hooks()
        if index not in indices or hooks is None or hooks[0] is not self._pack:
            return func(*args, **kwargs)
        given = tensors_of(args)
        return self.kept_call((func, index), func, args, kwargs, given + tensors_of(kwargs.values()) if kwargs else given)

    def linear_called(self, given: list[torch.Tensor]) -> Any:
        """The forward of an ``nn.Linear`` was called: all it does is to call the function of that name with these tensors."""
        index = self.calls[F.linear]
        self.calls[F.linear] = index + 1
        hooks = private.top_hooks()
        if index not in self._indices[F.linear] or hooks is None or hooks[0] is not self._pack:
            return F.linear(*given)
        return self.kept_call((F.linear, index), F.linear, given, _NO_KWARGS, given)

    def module_called(self, key: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a module, named by its ``id``, was called."""
        index = self.calls.get(key)
        if index is None:
            return run(*args, **kwargs)
        self.calls[key] = index + 1
        given = self._given(args, kwargs) if index in self._indices[key] and self._is_ours() else None
        return run(*args, **kwargs) if given is None else self.kept_call((key, index), run, args, kwargs, given)

    def applied(self, function: Any, run: Callable[..., Any], args: tuple[Any, ...], takes_context: bool) -> Any:
        """The forward of an autograd Function was called; its first argument may be the context."""
        index = self.calls.get(function)
        if index is None:
            return run(*args)
        self.calls[function] = index + 1
        if index not in self._indices[function] or not self._is_ours():
            return run(*args)
        given = tensors_of(args[1:] if takes_context else args)
        return self.kept_apply((function, index), run, args, args[0] if takes_context else None, given)

    @staticmethod
    def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        values = (*args, *kwargs.values()) if kwargs else args
        if all(type(value) is torch.Tensor or type(value) in ATOMS for value in values):
            return tensors_of(values)
        try:
            return tensors_in((args, kwargs))
        except InvalidInputError:
            return None

    def _is_ours(self) -> bool:
        """Whether what autograd saves comes to this region; it may be that of a region, or of hooks, inside it."""
        hooks = private.top_hooks()
        return hooks is not None and hooks[0] is self._pack

    def kept_call(self, key: Key, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Do what is to be done with a call that is kept, and return its result."""
        raise NotImplementedError

    def kept_apply(self, key: Key, run: Callable[..., Any], args: Any, context: Any, given: list[torch.Tensor]) -> Any:
        """The same for the forward of an autograd Function; without a context it is given that afterwards."""
        raise NotImplementedError
