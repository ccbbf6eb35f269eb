"""Runs a scenario twice from the same state, plain and with its regions checkpointed, and compares everything bit for bit.

A scenario is a function that takes ``region``: a function that makes a region of a callable. In the plain run it gives the
callable back unchanged. What the scenario returns is compared, and so are the random states that it leaves behind.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import _steady

Region = Callable[[Callable[..., Any]], Callable[..., Any]]
Scenario = Callable[[Region], Any]


def _snapshot(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_snapshot(item) for item in value]
    return copy.deepcopy(value)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _assert_identical(found: Any, expected: Any, path: str) -> None:
    assert type(found) is type(expected), f"{path}: {type(found)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), path
        assert _bits(found) == _bits(expected), f"{path}: {found} is not {expected}"
    elif isinstance(expected, dict):
        assert list(found) == list(expected), path
        for key in expected:
            _assert_identical(found[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_identical(one, other, f"{path}[{index}]")
    else:
        assert found == expected, f"{path}: {found!r} is not {expected!r}"


def _random_states() -> list[Any]:
    name, keys, position, *_ = np.random.get_state()
    return [torch.get_rng_state(), repr(random.getstate()), name, keys.tolist(), position]


def _record(scenario: Scenario, region: Region) -> list[Any]:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    result = scenario(region)
    return [_snapshot(result), _random_states()]


@pytest.fixture
def compare() -> Callable[..., None]:
    """``compare(scenario, **options)`` fails unless the checkpointed run equals the plain one in every bit."""

    def same_as_plain(scenario: Scenario, **options: Any) -> None:
        plain = _record(scenario, lambda fn: fn)
        replayed = _record(scenario, lambda fn: lowtide.checkpoint(fn, **options))
        _assert_identical(replayed, plain, "run")

    return same_as_plain


@pytest.fixture
def train() -> Callable[..., list[Any]]:
    """``train(call, owner)`` takes a few steps with SGD: long enough for an audited run and for learned ones."""

    def steps(
        call: Callable[..., Any],
        owner: nn.Module | Iterable[torch.Tensor] = (),
        *,
        inputs: Callable[[], tuple[Any, ...]] = lambda: (torch.randn(5, 4, requires_grad=True),),
        count: int = 4,
    ) -> list[Any]:
        parameters = list(owner.parameters()) if isinstance(owner, nn.Module) else list(owner)
        seen = []
        for _ in range(count):
            given = inputs()
            result = call(*given)
            result.square().sum().backward()
            grads = [t.grad for t in (*given, *parameters) if isinstance(t, torch.Tensor)]
            seen.append(_snapshot([result, grads]))
            with torch.no_grad():
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
                        parameter.grad = None
        if isinstance(owner, nn.Module):
            seen.append(_snapshot(dict(owner.state_dict())))
        return seen

    return steps


@pytest.fixture
def steadily(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the calls that go the short way, and the replays that do."""
    seen = {"calls": 0, "replays": 0}
    run, replay = _steady.Steady.run, _steady.SteadyCall.replay

    def counted_run(self: Any, *args: Any) -> Any:
        result = run(self, *args)
        seen["calls"] += result is not _steady.NEWS
        return result

    def counted_replay(self: Any, *args: Any) -> bool:
        done = replay(self, *args)
        seen["replays"] += done
        return done

    monkeypatch.setattr(threading, "active_count", lambda: 1)  # threads of what runs the tests draw nothing
    monkeypatch.setattr(_steady.Steady, "run", counted_run)
    monkeypatch.setattr(_steady.SteadyCall, "replay", counted_replay)
    return seen
