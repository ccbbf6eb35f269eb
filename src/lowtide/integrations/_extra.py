"""Optional libraries, imported when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from lowtide.errors import MissingExtraError


def require(module: str, extra: str) -> Any:
    """Import a module of an optional library.

    Args:
        module: to import.
        extra: what installs it: the name of an optional dependency of lowtide.

    Raises:
        MissingExtraError: the library is not installed. An import error inside the library passes through.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in (module.partition(".")[0], extra):
            raise
        raise MissingExtraError(f"this needs {extra}, which is not installed: pip install 'lowtide[{extra}]'") from None
