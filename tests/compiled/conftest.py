"""Each test compiles anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    """What one test compiled is nothing to the next."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
