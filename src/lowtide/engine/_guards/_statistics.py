"""Statistics of batch norm: a forward in training writes to them, and has no use for what they were.

So a replay may begin with any values there, and nobody has to copy them in forward. That holds as long as nothing else in the region looks
at them: no op, and no function that might in another call.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from lowtide import _torch_private as private
from lowtide.engine._op_tensors import tensors_of_op

Table = dict[Any, Any]

_KINDS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})
_NAMES = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_LEADS_THERE = _NAMES | {"buffers", "named_buffers", "_buffers", "state_dict", "get_buffer"}


class Statistics:
    """Those in a module: of the modules in it whose forward is that of torch.

    Args:
        modules: all in it.
        tables: of buffers and parameters, in the order in which these are counted.
    """

    __slots__ = ("_owners", "_places", "_unread")

    def __init__(self, modules: Iterable[nn.Module], tables: Iterable[Table]) -> None:
        owners = [m.__dict__ for m in modules if type(m) in _KINDS and set(m._buffers) <= _NAMES]
        self._owners = [own for own in owners if "forward" not in own]
        kept = {id(own["_buffers"]) for own in self._owners}
        counted = enumerate((table, name) for table in tables for name in table)
        self._places = [(place, table, name) for place, (table, name) in counted if id(table) in kept]
        self._unread: dict[tuple[int, tuple[bool, ...]], frozenset[int]] = {}

    def note_read(self, code: int, trainings: list[bool], read: set[int] | None) -> None:
        """A call of some code, in these training modes, was watched.

        Args:
            code: a number of the code.
            trainings: the training flags.
            read: the memory that it read, see ``read_by``; ``None`` if it might have read any.
        """
        now = [(place, table.get(name)) for place, table, name in self._places] if read is not None else []
        unread = frozenset(place for place, tensor in now if tensor is not None and private.storage_key(tensor) not in (read or ()))
        key = code, (*trainings,)
        self._unread[key] = unread & self._unread.get(key, unread)

    def unread(self, code: int, trainings: list[bool]) -> frozenset[int]:
        """The places of those for which calls of this code, in these training modes, have no use."""
        return frozenset() if self.are_other() else self._unread.get((code, (*trainings,)), frozenset())

    def are_other(self) -> bool:
        """Whether somebody gave one of the modules another forward."""
        for own in self._owners:  # noqa: SIM110 – a generator takes longer
            if "forward" in own:
                return True
        return False

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is one of those that are in place."""
        for _, table, name in self._places:  # noqa: SIM110 – a generator takes longer
            if table.get(name) is tensor:
                return True
        return False


def names_statistics(code: CodeType) -> bool:
    """Whether a function, or one that it defines, might look at statistics."""
    if not _LEADS_THERE.isdisjoint(code.co_names):
        return True
    for value in code.co_consts:
        if names_statistics(value) if isinstance(value, CodeType) else isinstance(value, str) and value in _NAMES:
            return True
    return False


def read_by(func: Any, args: Any, kwargs: Any) -> set[int]:
    """The memory that an op reads, but for statistics that it only updates.

    Args:
        func: the op.
        args, kwargs: what it is given.

    Returns:
        Keys as of ``private.storage_key``.
    """
    schema = func._schema
    named = [*((a.name, value) for a, value in zip(schema.arguments, args, strict=False)), *kwargs.items()]
    updated: frozenset[str] = frozenset()
    if "batch_norm" in schema.name and "backward" not in schema.name:
        if dict(named).get("training", "_with_update" in schema.name):
            updated = frozenset({"running_mean", "running_var"})
    elif schema.name == "aten::add_":
        updated = frozenset({"self"})
    return {private.storage_key(tensor) for name, value in named if name not in updated for tensor in tensors_of_op(value)}
