"""Which module call is running: the regions of a step, as spans of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lowtide._torch_private import in_backward, without_function_modes
from lowtide.records import Call, Category
from lowtide.trace._storages import StorageTable


@dataclass(slots=True)
class _Row:
    path: str
    type: str
    parent: int | None
    start: int
    inputs: tuple[int, ...]
    replayed: bool
    end: int | None = None
    outputs: tuple[int, ...] = ()


class CallTable:
    """Module calls by index, in order of entry.

    Hooks note the spans: the pre-hook is the last to run before ``forward`` and the hook the first after it, so
    that a span is what a region would replay.
    """

    def __init__(self, storages: StorageTable, clock: Callable[[], int]) -> None:
        """Start an empty table."""
        self._storages, self._clock = storages, clock
        self._rows: list[_Row] = []
        self._running = storages.running
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def current(self) -> int | None:
        """Index of the innermost running call."""
        return self._running[-1][0] if self._running else None

    def in_replayed(self) -> bool:
        """Whether the innermost running call was entered in backward: somebody runs a forward again."""
        return bool(self._running) and self._rows[self._running[-1][0]].replayed

    def watch(self, model: nn.Module) -> None:
        """Install the hooks on every module of ``model``."""
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # runs in C++, takes no hooks, and cannot be a region
                continue
            self._handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._exit, prepend=True, with_kwargs=True, always_call=True))

    def unwatch(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, path: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = self._storages_of((args, kwargs))
            start = self._clock()
            self._rows.append(_Row(path, type(module).__name__, self.current(), start, inputs, in_backward()))
            self._running.append((len(self._rows) - 1, start))

        return enter

    def _exit(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        row = self._rows[self._running.pop()[0]]
        row.end, row.outputs = self._clock(), self._storages_of(output)

    def _storages_of(self, tree: Any) -> tuple[int, ...]:
        # Under the mode that sees functions, to look at a tensor is one.
        with without_function_modes():
            return self._storages.rows_of(_tensors_of(tree), Category.INPUT)

    def records(self) -> tuple[Call, ...]:
        """The rows as records."""
        end = self._clock()
        replaced: dict[int, list[int]] = {}
        for call, storage in self._storages.replaced:
            replaced.setdefault(call, []).append(storage)
        ends = [end if row.end is None else row.end for row in self._rows]
        return tuple(
            Call(r.path, r.type, r.parent, r.start, until, r.inputs, r.outputs, replaced=tuple(replaced.get(call, ())))
            for call, (r, until) in enumerate(zip(self._rows, ends, strict=True))
        )


def _tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in what a module takes or returns. The plainest containers are looked through here, ten times as fast."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if type(tree) in (tuple, list):
        return [tensor for part in tree for tensor in _tensors_of(part)]
    if type(tree) is dict:
        return _tensors_of(list(tree.values()))
    return [] if tree is None else [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
