"""Runs a scenario plain and with its regions keeping results, compares every bit, and counts how often an op really ran."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lowtide.engine
from lowtide.records import CallSite, Decision

Rule = Callable[[CallSite], bool]
RUNS = bytearray(1)
"""No list: a replay would see that, and put it back."""


@torch.library.custom_op("lowtide_kept::costly", mutates_args=())
def costly(x: torch.Tensor) -> torch.Tensor:
    """An op that counts its runs. Its backward needs its argument."""
    RUNS[0] += 1
    return torch.sin(x) * 2


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad * torch.cos(ctx.saved_tensors[0]) * 2


costly.register_autograd(_backward, setup_context=_save)


class Choose:
    """A policy made of a function."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.asked: list[CallSite] = []

    def decide(self, site: CallSite) -> Decision:
        self.asked.append(site)
        return Decision.KEEP if self.rule(site) else Decision.RECOMPUTE


def function(*names: str) -> Rule:
    """Calls of functions with one of these names."""
    return lambda site: site.level == "function" and getattr(site.function, "__name__", "") in names


def module(*types: type) -> Rule:
    """Calls of modules of one of these classes."""
    return lambda site: site.level == "module" and isinstance(site.function, types)


def costly_calls(site: CallSite) -> bool:
    """Calls of ``costly``."""
    return site.level == "function" and any("costly" in str(op) for op in site.ops)


def everything(site: CallSite) -> bool:
    """Every call of a function."""
    return site.level == "function"


@pytest.fixture
def runs() -> bytearray:
    """How often ``costly`` ran."""
    RUNS[0] = 0
    return RUNS


def snapshot(value: Any) -> Any:
    """A copy that later steps leave alone."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


def assert_same(found: Any, expected: Any) -> None:
    """Every bit is the same."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.contiguous().reshape(-1).view(torch.uint8).tolist() == expected.contiguous().reshape(-1).view(torch.uint8).tolist()
    else:
        assert found == expected


@pytest.fixture
def compare() -> Callable[..., None]:
    """``compare(scenario, rule)``: three steps from one random state, with the gradients and random states that each leaves."""

    def record(scenario: Callable[[Any], Any], region: Any, steps: int) -> list[Any]:
        torch.manual_seed(7)
        random.seed(7)
        np.random.seed(7)
        step = scenario(region)
        return [snapshot([step(), torch.get_rng_state(), random.random(), float(np.random.rand())]) for _ in range(steps)]

    def same_as_plain(scenario: Callable[[Any], Any], rule: Rule, *, steps: int = 3, **options: Any) -> None:
        plain = record(scenario, lambda fn: fn, steps)
        policy = Choose(rule)
        kept = record(scenario, lambda fn: lowtide.engine.checkpoint(fn, policy=policy, **options), steps)
        assert any(map(rule, policy.asked))
        assert_same(kept, plain)

    return same_as_plain
