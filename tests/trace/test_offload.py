"""A trace whose saved tensors are kept away is the same trace, and the saved tensors are really away."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.records import StepTrace
from lowtide.trace import record_step, saved_away, trace
from lowtide.trace._keep import away

sys.path.insert(0, str(Path(__file__).parent))
from _steps import STEPS, residual_net


def untimed(traced: StepTrace) -> StepTrace:
    return dataclasses.replace(traced, ops=tuple(dataclasses.replace(op, seconds=0.0) for op in traced.ops))


@pytest.mark.parametrize("name", ["gpt", "autocast", "gradient_penalty", "recurrent", "shared", "function_transforms"])
def test_the_trace_is_the_same(name: str) -> None:
    model, step = STEPS[name]()
    step()
    assert untimed(trace(model, step, offload=True)) == untimed(trace(model, step))


def test_a_copy_that_is_kept_away_has_the_same_bits_and_is_a_file() -> None:
    storage = torch.randn(100_000).untyped_storage()
    before = bytes(storage.tolist())
    get = away(storage)
    storage.fill_(0)
    assert bytes(get().tolist()) == before
    assert Path(str(get().filename)).name.startswith("lowtide-")
    assert not Path(str(get().filename)).exists()


def test_an_empty_storage_is_kept() -> None:
    assert away(torch.empty(0).untyped_storage())().nbytes() == 0


def test_gradients_are_those_of_the_plain_step() -> None:
    model, x = residual_net()

    def step() -> None:
        model.zero_grad()
        torch.manual_seed(0)
        model(x).square().mean().backward()

    step()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    record_step(model, step, offload=True)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("transform", ["vmap of grad", "jacrev", "hessian", "jvp"])
def test_under_function_transforms_the_trace_and_the_gradients_are_those_of_the_plain_step(transform: str) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    x = torch.randn(16, 8)

    def of_one(row: torch.Tensor) -> torch.Tensor:
        return model(row).sum()

    values = {
        "vmap of grad": lambda: torch.func.vmap(torch.func.grad(of_one))(x),
        "jacrev": lambda: torch.func.jacrev(model)(x[0]),
        "hessian": lambda: torch.func.hessian(of_one)(x[0]),
        "jvp": lambda: torch.func.jvp(model, (x,), (x.cos(),))[1],
    }[transform]

    def step() -> None:
        model.zero_grad()
        (values().square().sum() + model(x).sum()).backward()

    step()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    there, away_from_it = (untimed(trace(model, step, offload=offload)) for offload in (False, True))
    assert there == away_from_it
    assert any(saved.used is not None for saved in there.saved)
    for run in (lambda: record_step(model, step, offload=True), lambda: run_with_saved_away(step)):
        run()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True) if p.grad is not None)


def run_with_saved_away(step: Callable[[], None]) -> None:
    with saved_away():
        step()
