"""Finding the kept calls while a region runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
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
_frame = sys._getframe
_CALLING_MODULES = vars(torch.nn.modules.module)
_BOUNDARY = "run_finding"
"""What calls a region: of the frames around it, those of a replay are others."""


def _site_of(frame: FrameType | None) -> int:
    """The line of code that calls something, with the two around it: a helper may be called for this and for that.

    How modules are called is left out: it differs where somebody looks on.
    """
    found, left = 0, 3
    while frame is not None and left:
        code = frame.f_code
        if code.co_name == _BOUNDARY:
            break
        if frame.f_globals is not _CALLING_MODULES:
            found = found * 31 + id(code) + frame.f_lasti
            left -= 1
        frame = frame.f_back
    return found


class Finder(Between):
    """Counts calls, by function and by module, and hands over those that are kept.

    Attributes:
        choice: which calls are kept.
        place: how many marks were passed so far, see ``Choice``.
        looking: it is a function mode in force, so that it is told of calls of functions.
        deep: calls are told by the lines around them as well.
    """

    def __init__(self, choice: Choice, pack: Pack, deep: bool) -> None:
        self.choice, self.deep = choice, deep
        self.place, self.looking = 0, False
        self._around = 0
        self._indices = choice.indices
        self._pack = pack

    def begin(self) -> None:
        """The region begins."""
        self._around = private.function_mode_count()
        if self.choice.looks is None or 0 in self.choice.looks:
            self.look(True)

    def end(self) -> None:
        """The region ends."""
        if self.looking:
            private.pop_function_mode()

    def look(self, wanted: bool) -> None:
        """Be told of calls of functions from now on, or no more; where a mode of the user's is in force over this one, nothing changes."""
        over = private.function_mode_count() - self._around
        if wanted and not over:
            private.push_function_mode(self)
            self.looking = True
        elif not wanted and over == 1:
            top = private.pop_function_mode()
            self.looking = top is not self
            if self.looking:
                private.push_function_mode(top)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indices = self._indices.get(func)
        if indices is None:
            return func(*args) if kwargs is None else func(*args, **kwargs)
        frame = _frame(1)
        index = self.counted(func, _site_of(frame) if self.deep else id(frame.f_code) + frame.f_lasti)
        kwargs = kwargs or {}
        hooks = private.top_hooks()
        if index not in indices or hooks is None or hooks[0] is not self._pack:
            return func(*args, **kwargs)
        given = tensors_of(args)
        return self.kept_call((func, index), func, args, kwargs, given + tensors_of(kwargs.values()) if kwargs else given)

    def linear_called(self, key: int, given: list[torch.Tensor]) -> Any:
        """The forward of an ``nn.Linear`` was called: all it does is to call the function of that name with these tensors."""
        index = self.counted(F.linear, _site_of(_frame(2)) if self.deep else key)
        hooks = private.top_hooks()
        if index not in self._indices[F.linear] or hooks is None or hooks[0] is not self._pack:
            return F.linear(*given)
        return self.kept_call((F.linear, index), F.linear, given, _NO_KWARGS, given)

    def module_called(self, key: int, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a module, named by its ``id``, was called."""
        if key not in self._indices:
            return run(*args, **kwargs)
        index = self.counted(key, _site_of(_frame(2)) if self.deep else 0)
        given = self._given(args, kwargs) if index in self._indices[key] and self._is_ours() else None
        return run(*args, **kwargs) if given is None else self.kept_call((key, index), run, args, kwargs, given)

    def applied(self, function: Any, run: Callable[..., Any], args: tuple[Any, ...], takes_context: bool) -> Any:
        """The forward of an autograd Function was called; its first argument may be the context."""
        if function not in self._indices:
            return run(*args)
        index = self.counted(function, _site_of(_frame(3)) if self.deep else 0)
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

    def counted(self, key: Any, site: int) -> int:
        """Which call of a function that is ever kept, or of a module by its ``id``, this one is, from this line of code."""
        raise NotImplementedError

    def calls(self) -> dict[Any, int]:
        """How often each of these was called so far."""
        raise NotImplementedError

    def kept_call(self, key: Key, run: Callable[..., Any], args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Do what is to be done with a call that is kept, and return its result."""
        raise NotImplementedError

    def kept_apply(self, key: Key, run: Callable[..., Any], args: Any, context: Any, given: list[torch.Tensor]) -> Any:
        """The same for the forward of an autograd Function; without a context it is given that afterwards."""
        raise NotImplementedError
