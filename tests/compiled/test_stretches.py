"""Where a graph is cut into stretches, which gradients are zero but for rounding, and what shares compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled import _fit, _partitioner
from lowtide.compiled._stretches import Stretches

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


class Chain(nn.Module):
    """One product a block, so that as much is alive between any two of them, but for running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh()) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_running_statistics_add_up_and_hide_no_place_between_blocks(joint_of):
    joint = joint_of(Chain())
    stretches = Stretches(joint, [0.0] * len(joint.nodes))
    products = [[str(joint.nodes[i].target) for i in stretches.nodes(k, k + 1)].count("aten.addmm.default") for k in range(5)]
    assert products == [1, 1, 1, 1, 1]


def test_a_gradient_that_is_zero_but_for_rounding_may_be_another():
    seen = {"gradient of a": torch.tensor([0.5]), "gradient of b": torch.tensor([1e-7]), "loss": torch.tensor(2.0)}
    noise = _fit._noise(seen)
    assert noise.keys() == {"gradient of a", "gradient of b"}
    assert noise["gradient of b"] > 2
    assert noise["gradient of a"] < 1e-4
    half = {name: tensor.bfloat16() for name, tensor in seen.items()}
    assert _fit._noise(half)["gradient of a"] == pytest.approx(0.01)


def test_what_has_no_rule_shares_nothing_with_what_has_one():
    ruled, unruled = _partitioner.Partitioner(_partitioner.Rule), _partitioner.Partitioner(_refused)
    assert ruled == _partitioner.Partitioner(_partitioner.Rule)
    assert unruled != ruled
    assert ruled != unruled
    assert unruled == unruled


def _refused() -> _partitioner.Rule:
    raise lowtide.InvalidInputError("a share of nothing")
