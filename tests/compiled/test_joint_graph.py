"""What may become of the nodes of a joint graph, and the timelines of what forward saves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowtide.compiled._joint import Joint
from lowtide.compiled._timeline import Timelines

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.norm(self.up(x))), 0.2, self.training))


class Written(nn.Module):
    """Its gradient reads a buffer that forward writes to afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.register_buffer("mean", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.mean.exp()
        y = x * self.weight * scale
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y


def named(joint: Joint, part: str) -> list[int]:
    return [i for i, node in enumerate(joint.nodes) if part in str(node.target)]


def test_random_ops_are_not_replayed_and_what_follows_from_a_seed_is(joint_of):
    joint = joint_of(Dropped())
    seeds, draws = named(joint, "inductor_seed"), named(joint, "inductor_random")
    assert seeds
    assert draws
    assert not any(joint.replayable[i] for i in named(joint, "inductor_seeds"))
    assert all(joint.replayable[i] for i in draws)
    leanest = Timelines(joint, [0.0] * len(joint.nodes)).of([])
    assert leanest.possible
    assert any(i in leanest.saved for i in named(joint, "inductor_seeds"))
    assert leanest.saved_bytes < Timelines(joint, [0.0] * len(joint.nodes)).of(range(len(joint.nodes))).saved_bytes


def test_what_reads_an_input_that_is_written_to_is_saved(joint_of):
    joint = joint_of(Written())
    [copy] = named(joint, "copy_")
    buffer = joint.number[joint.nodes[copy].args[0]]
    assert not joint.savable[buffer]
    timeline = Timelines(joint, [0.0] * len(joint.nodes)).of([])
    assert timeline.possible
    assert buffer not in timeline.saved
    assert any(joint.nodes[i].op == "call_function" for i in timeline.saved)
