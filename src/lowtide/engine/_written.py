"""What a region reads and writes to: a region that the compiler cannot replay rightly.

In a graph, writing to what comes from outside of it (a buffer, a cache) is done when its forward is over, and its backward is given the
tensor as it is then. A replay in backward would compute with the new value, where the forward computed with the old, and no error would
tell. So such regions are not taken into a graph. Statistics that are only written to (batch norm's in training) do no harm, nor does what
the graph itself has made: of that it keeps every value that is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from lowtide.engine._kept._sites import is_view
from lowtide.engine._op_tensors import tensors_of_op


class Touched:
    """The tensors from outside of a region that its ops have touched."""

    def __init__(self) -> None:
        self._made: dict[int, torch.Tensor] = {}
        self._roots: dict[int, torch.Tensor | None] = {}
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}
        self._read: set[int] = set()

    def before(self, op: Any, args: Any, kwargs: Any) -> torch.Tensor | None:
        """An op is about to run; returns of which tensor from outside its result is a view, if it is one."""
        schema = op._schema.arguments
        writes = {argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write}
        named = {argument.name: value for argument, value in zip(schema, args, strict=False)} | kwargs
        shown = None
        for name, value in named.items():
            for tensor in tensors_of_op(value):
                root = self._roots.get(id(tensor)) if id(tensor) in self._made else tensor
                if root is None:
                    continue
                shown = shown if shown is not None else root
                if root.grad_fn is None:
                    self._versions.setdefault(id(root), (root, root._version))
                if name not in writes and not is_view(op):
                    self._read.add(id(root))
        return shown if is_view(op) else None

    def after(self, result: Any, shown: torch.Tensor | None) -> None:
        """It has run."""
        for tensor in tensors_of_op(result):
            if id(tensor) not in self._versions and id(tensor) not in self._made:
                self._made[id(tensor)] = tensor
                self._roots[id(tensor)] = shown

    def written(self) -> torch.Tensor | None:
        """One that was read and is written to, if there is one."""
        for key, (tensor, version) in self._versions.items():
            if key in self._read and tensor._version != version:
                return tensor
        return None
