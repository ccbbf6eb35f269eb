"""Optional libraries, with their own warnings left aside while they are imported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

OTHERS_WARNINGS = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::PendingDeprecationWarning")
"""Libraries about themselves and each other. ``UserWarning`` stays an error: lowtide's are of that kind."""


def library(name: str, target: str = "test-integrations") -> Any:
    """Import a library, or skip the tests of the module that asks for it; ``target`` of the Makefile installs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed here: make {target} installs it and runs this")
