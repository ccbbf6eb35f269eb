"""Each test compiles anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled import _costs, _partitioner
from lowtide.compiled._joint import Joint


class StopError(Exception):
    """Ends a compilation once its joint graph was seen."""


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    """What one test compiled is nothing to the next."""
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def joint_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], Joint]:
    """The joint graph of a model of 16 features, as the partitioner is given it; each op takes a millisecond."""
    monkeypatch.setattr(_costs, "seconds", lambda run, device: 1e-3)
    found: list[Joint] = []

    def stop(joint, costs, own):
        found.append(joint)
        raise StopError

    monkeypatch.setattr(_partitioner, "_menu", stop)

    def joint_of(model: nn.Module) -> Joint:
        model.compile(options=lowtide.compile_options("1GiB"))
        with pytest.raises(Exception, match="StopError"):
            model(torch.randn(32, 16)).sum().backward()
        return found[-1]

    return joint_of
