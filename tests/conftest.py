"""What every test shares: one thread, a known random state, no time limit on generated examples, and little garbage to look for."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("lowtide", deadline=None)
settings.load_profile("lowtide")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes that share the tests have to know each by the same name, so none may have an address in it."""
    if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"names of tests that are others in every process, give them ids: {', '.join(changing)}")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Results and times must not depend on how many cores a machine has; nor those of processes that a test starts."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> None:
    """What was imported stays: half a million objects that no collection of garbage in a test has to go through."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def known_random_state() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
