"""Which call of a torch function ran which ops: what a region may keep the results of, so that a replay need not run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide._torch_private import in_backward
from lowtide.records import CallSite, Category, FunctionCall
from lowtide.trace._storages import StorageTable


@dataclass(slots=True)
class _Row:
    function: Any
    call: int
    start: int
    end: int
    outputs: tuple[int, ...]


class FunctionTable(TorchFunctionMode):
    """Calls of torch functions in modules, in forward, that run ops, in order. Functions called inside another are part of that one.

    Args:
        storages: the table of storages.
        clock: the number of ops that have run.
        current_call: index of the innermost module call, if any.

    Attributes:
        running_since: how many ops had run when the function that runs was called; ``None`` between calls.
    """

    def __init__(self, storages: StorageTable, clock: Callable[[], int], current_call: Callable[[], int | None]) -> None:
        """Start an empty table."""
        super().__init__()
        self._storages, self._clock, self._current_call = storages, clock, current_call
        self._rows: list[_Row] = []
        self.running_since: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it."""
        start, around = self._clock(), self.running_since
        self.running_since = start
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.running_since = around
        end = self._clock()
        call = self._current_call()
        if call is not None and not in_backward():
            own = end > start and torch.is_grad_enabled()
            self._rows.append(_Row(func, call, start, end, self._storages_of(result) if own else ()))
        return result

    def _storages_of(self, result: Any) -> tuple[int, ...]:
        parts = result if isinstance(result, (tuple, list)) else (result,)
        return self._storages.rows_of([part for part in parts if isinstance(part, torch.Tensor)], Category.ACTIVATION)

    def records(self) -> tuple[FunctionCall, ...]:
        """The rows as records. Of functions that sometimes run an op all calls are, for they are counted to tell them apart."""
        names = {function: CallSite(function, "function").function_name for function in {row.function for row in self._rows}}
        ran = {names[row.function] for row in self._rows if row.end > row.start}
        return tuple([FunctionCall(names[r.function], r.call, r.start, r.end, r.outputs) for r in self._rows if names[r.function] in ran])
