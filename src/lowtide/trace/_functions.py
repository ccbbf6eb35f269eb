"""Which call of a torch function ran which ops: what a region may keep the results of, so that a replay need not run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide._torch_private import graph_task_id
from lowtide.records import CallSite, Category, FunctionCall
from lowtide.trace._acceleration import records_of
from lowtide.trace._storages import StorageTable

_ACTIVATION = Category.ACTIVATION


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
        # Function, call, start, end and outputs of each.
        self._rows: list[tuple[Any, int, int, int, tuple[int, ...]]] = []
        self.running_since: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and note it."""
        start, around = self._clock(), self.running_since
        self.running_since = start
        try:
            result = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            self.running_since = around
        call = self._current_call()
        if call is not None and graph_task_id() == -1:
            end = self._clock()
            own = end > start and torch.is_grad_enabled()
            self._rows.append((func, call, start, end, self._storages_of(result) if own else ()))
        return result

    def _storages_of(self, result: Any) -> tuple[int, ...]:
        if isinstance(result, torch.Tensor):
            return self._storages.rows_of((result,), _ACTIVATION)
        parts = result if isinstance(result, (tuple, list)) else ()
        return self._storages.rows_of([part for part in parts if isinstance(part, torch.Tensor)], _ACTIVATION)

    def records(self) -> tuple[FunctionCall, ...]:
        """The rows as records. Of functions that sometimes run an op all calls are, for they are counted to tell them apart."""
        names = {function: CallSite(function, "function").function_name for function in {function for function, *_ in self._rows}}
        ran = {names[function] for function, _, start, end, _ in self._rows if end > start}
        rows = [(names[function], *row) for function, *row in self._rows if names[function] in ran]
        return records_of(FunctionCall, *zip(*rows, strict=True)) if rows else ()
