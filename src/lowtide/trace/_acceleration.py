"""The hot path of a trace, compiled, where it could be: ``_native*.c``, which ``build_native.py`` compiles as lowtide is installed.

The twins in Python: ``Recorder.__torch_dispatch__`` and ``_phase``, ``look_at`` and ``tensors_in`` of ``_ops.py``, ``StorageTable.rows_of``
and ``_gone``, ``CpuExecution.run``, ``OpTable.add``, and ``records_of`` here. They run where there was no compiler, where LOWTIDE_NATIVE=0
says so, and under fake tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from lowtide._native_loading import load_native

R = TypeVar("R")

native = load_native("lowtide.trace._native", 1)


def records_of(record: type[R], *columns: Sequence[Any]) -> tuple[R, ...]:
    """Frozen records of a class, made of the columns of a table: as many as all its fields, in their order.

    >>> from lowtide.records import Gather
    >>> [gather.call for gather in records_of(Gather, [3, 7], [(0,), (1, 2)], [0.5, 0.25], [9, 5], [12, 6])]
    [3, 7]
    """
    return tuple(map(record, *columns)) if native is None else native.records_of(record, *columns)
