"""The comparison finds each way in which a step can differ, and nothing where there is none."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.errors import VerificationError
from lowtide.trace import TrainingState
from lowtide.verify import Reference, Verification, same_bits

# Outside of the model, whose attributes are put back before each run.
FAULT = {"now": ""}


class Planted(nn.Module):
    """Computes something else while a fault is on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fault = FAULT["now"]
        self.count += 2 if fault == "buffer" else 1
        if fault == "random state":
            torch.rand(1)
        if fault == "random state of Python":
            random.random()
        if fault == "random state of NumPy":
            np.random.rand()
        x = torch.dropout(self.linear(x), 0.5, fault != "mask")
        if fault == "output":
            return torch.where(x == 0, x, x)[[1, 0, *range(2, len(x))]]
        return x.detach() + 0 * x if fault == "gradient" else x


def verified(fault: str, monkeypatch: pytest.MonkeyPatch) -> Verification:
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    step()
    reference = Reference(model, step, TrainingState(model))
    monkeypatch.setitem(FAULT, "now", fault)
    return reference.compare()


def test_equal_steps_are_equal_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified("", monkeypatch)
    assert result.equal
    assert result.repeatable
    assert result.gradients == 2
    assert not result.different
    assert "equal to the last bit" in result.summary
    result.raise_if_different()


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("buffer", "buffer count"),
        ("random state", "random state 0"),
        ("gradient", "gradient of linear.weight"),
        ("mask", "loss"),
        ("random state of Python", "random state of Python"),
        ("random state of NumPy", "random state of NumPy"),
        ("output", "output 0"),
        ("gradient", "optimizer state momentum_buffer of linear.bias"),
        ("gradient", "parameter linear.bias"),
    ],
)
def test_a_planted_fault_is_found_and_named(fault: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = verified(fault, monkeypatch)
    assert not result.equal
    assert found in result.different
    with pytest.raises(VerificationError, match="differs from the plain one in"):
        result.raise_if_different()


def test_the_state_is_put_back() -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()

    def step() -> None:
        model(torch.randn(2, 2)).sum().backward()
        with torch.no_grad():
            model.weight += 1

    Reference(model, step, TrainingState(model)).compare()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_a_step_that_is_not_repeatable_is_said_to_be() -> None:
    model = nn.Linear(2, 2)
    drawn = iter(torch.linspace(1, 2, 100))

    def step() -> torch.Tensor:
        loss = model(torch.ones(1, 2) * next(drawn)).sum()
        loss.backward()
        return loss

    result = Reference(model, step, TrainingState(model)).compare()
    assert not result.repeatable
    assert "last bit" not in result.summary


def test_bits_tell_zeros_and_nans_apart() -> None:
    assert same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    assert not same_bits(torch.zeros(2), torch.zeros(3))
    assert same_bits(torch.zeros(2, 3).t(), torch.zeros(3, 2))
