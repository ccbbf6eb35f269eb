"""A missing library skips its tests, except where they are what is run: there every library has to be there."""

from __future__ import annotations

import importlib
import os

import pytest

# Nothing may be fetched from a hub, and nobody is told that tests were run.
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def pytest_collection_finish(session: pytest.Session) -> None:
    """``LOWTIDE_TEST_LIBRARIES`` names what must not be skipped."""
    for name in os.environ.get("LOWTIDE_TEST_LIBRARIES", "").split():
        importlib.import_module(name)
