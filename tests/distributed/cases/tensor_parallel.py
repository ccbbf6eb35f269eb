"""Layers whose matrices are split: regions over modules of ``DTensor``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import WIDTH, apply, descend, gradients, same_as_plain
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(normed)) * self.up(normed))


_TENSOR = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
_SEQUENCE = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "gate": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def _train(policy, plan, first, sequence):
    torch.manual_seed(0)
    model = nn.Sequential(*(Mlp() for _ in range(3)))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    handle = apply(model, policy) if first else None
    for block in model:
        parallelize_module(block, mesh, plan)
    if sequence:
        given = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model, mesh, {"0": given})
    handle = handle if first else apply(model, policy)
    torch.manual_seed(5)  # all processes of such a group have the same data
    seen = []
    for _ in range(3):
        x = torch.randn(2, 4, WIDTH)
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()] if sequence else x
        x.requires_grad_()
        out = model(x)
        (out.full_tensor() if sequence else out).square().mean().backward()
        seen += [x.grad, *gradients(model.parameters())]
        descend(model.parameters())
    return seen, handle


def case_tensor_parallel():
    for first in (True, False):
        same_as_plain(lambda policy, first=first: _train(policy, _TENSOR, first, False))


def case_sequence_parallel():
    for first in (True, False):
        same_as_plain(lambda policy, first=first: _train(policy, _SEQUENCE, first, True))
