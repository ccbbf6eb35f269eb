"""Stand-ins for ``module.forward`` of modules whose results are kept, while regions run that keep them.

What stands in is an attribute of the module *instance*, as an installed region is. It is put there when the first region that needs it
begins, on whichever thread, and taken out when the last is over, so that between steps nothing of the module is changed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowtide.engine._thread import state

if TYPE_CHECKING:
    from lowtide.engine._kept._finding import Finder

_lock = threading.RLock()


class StandIn:
    """Tells the finder of the region that runs in this thread of the call.

    Attributes:
        key: ``id`` of the module.
        table: its ``__dict__``.
        before: what was its attribute ``forward``.
        users: regions that run and need it.
    """

    __slots__ = ("__weakref__", "_module", "before", "key", "table", "users")

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.table = module.__dict__
        self.before: Callable[..., Any] | None = None
        self.key = id(module)
        self.users = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        finder: Finder | None = state.finder
        if finder is None:
            return self._run()(*args, **kwargs)
        choice, key, given = finder.choice, self.key, None
        if key in choice.linears and not kwargs:
            given = self._given_to_linear(args)
        looks, step = choice.looks, key in choice.marks
        finder.place += step
        inside = given is None and key not in choice.closed and (looks is None or finder.place in looks)
        if inside is not finder.looking:
            finder.look(inside)
        try:
            if given is not None and not finder.looking:
                return finder.linear_called(key, given)
            return finder.module_called(key, self._run(), args, kwargs)
        finally:
            finder.place += step
            after = looks is None or finder.place in looks
            if after is not finder.looking:
                finder.look(after)

    def _run(self) -> Callable[..., Any]:
        """What it stands in for."""
        if self.before is not None:
            return self.before
        module = self._module()
        return type(module).forward.__get__(module)  # type: ignore[union-attr, no-any-return]

    def _given_to_linear(self, args: tuple[Any, ...]) -> list[torch.Tensor] | None:
        """What ``F.linear`` will be given, in order; ``None`` if it is not just that which is about to be called."""
        parameters = self.table["_parameters"]
        weight, bias = parameters.get("weight"), parameters.get("bias", self)
        if self.before is not None or len(args) != 1 or type(args[0]) is not torch.Tensor or weight is None or bias is self:
            return None
        if "weight" in self.table or "bias" in self.table:  # which hide the parameters
            return None
        return [args[0], weight] if bias is None else [args[0], weight, bias]


_stand_ins: weakref.WeakKeyDictionary[nn.Module, StandIn] = weakref.WeakKeyDictionary()


def stand_in_for(module: nn.Module) -> StandIn:
    """The one of this module."""
    with _lock:
        known = _stand_ins.get(module)
        if known is None:
            known = _stand_ins[module] = StandIn(module)
        return known


def put_stand_ins(stand_ins: Sequence[StandIn]) -> None:
    """From now on the finder of this thread is told of calls of these modules."""
    with _lock:
        for stand_in in stand_ins:
            if not stand_in.users:
                table = stand_in.table
                stand_in.before = table.get("forward")
                table["forward"] = stand_in
            stand_in.users += 1


def take_out_stand_ins(stand_ins: Sequence[StandIn]) -> None:
    """Undo it. What others put over one meanwhile stays, and finds no region to tell of the call."""
    with _lock:
        for stand_in in stand_ins:
            stand_in.users -= 1
            table = stand_in.table
            if stand_in.users or table.get("forward") is not stand_in:
                continue
            if stand_in.before is None:
                del table["forward"]
            else:
                table["forward"] = stand_in.before
