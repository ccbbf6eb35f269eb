"""Compiled parts of lowtide, each of which has a twin in Python: what was made of them as lowtide was installed."""

from __future__ import annotations

import importlib
import os
from types import ModuleType


def load_native(name: str, api: int) -> ModuleType | None:
    """A compiled module; ``None`` if there was no compiler, if ``LOWTIDE_NATIVE=0`` says so, or if it was made for another release.

    Args:
        name: of the module.
        api: the number that it has to have as ``API``: it counts up with what its users expect of it.
    """
    if os.environ.get("LOWTIDE_NATIVE") == "0":
        return None
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    return module if api == module.API else None
