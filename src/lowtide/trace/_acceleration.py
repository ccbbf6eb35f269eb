"""The hot path of a trace, compiled, where it could be: ``_native*.c``, which ``build_native.py`` compiles as lowtide is installed.

The twins in Python: ``Recorder.__torch_dispatch__`` and ``_phase``, ``look_at`` and ``tensors_in`` of ``_ops.py``, ``StorageTable.rows_of``
and ``_gone``, ``CpuExecution.run``, ``OpTable.add``, and ``records_of`` here. They run where there was no compiler, where LOWTIDE_NATIVE=0
says so, and under fake tensors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeVar

_API = 1
"""Of the compiled code that goes with this release: what was compiled for another is not used."""

R = TypeVar("R")


def _load() -> ModuleType | None:
    if os.environ.get("LOWTIDE_NATIVE") == "0":
        return None
    try:
        from lowtide.trace import _native
    except ImportError:
        return None
    return _native if _native.API == _API else None


native = _load()


def records_of(record: type[R], *columns: Sequence[Any]) -> tuple[R, ...]:
    """Frozen records of a class, made of the columns of a table: as many as all its fields, in their order.

    >>> from lowtide.records import Gather
    >>> [gather.call for gather in records_of(Gather, [3, 7], [(0,), (1, 2)], [0.5, 0.25], [9, 5], [12, 6])]
    [3, 7]
    """
    return tuple(map(record, *columns)) if native is None else native.records_of(record, *columns)
