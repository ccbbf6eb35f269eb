"""What every test shares: one thread, a known random state, and no time limit on generated examples."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

settings.register_profile("lowtide", deadline=None)
settings.load_profile("lowtide")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Results and times must not depend on how many cores a machine has."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def known_random_state() -> None:
    """Each test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
