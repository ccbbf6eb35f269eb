"""Parts of scipy, each imported when it is first used: together they take longer to import than all of lowtide does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scipy import optimize as optimize
    from scipy import sparse as sparse


def __getattr__(name: str) -> Any:
    if name not in ("optimize", "sparse"):
        raise AttributeError(name)
    return importlib.import_module(f"scipy.{name}")
