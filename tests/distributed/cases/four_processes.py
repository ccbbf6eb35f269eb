"""Four stages of a pipeline; replicas of split layers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import Model, apply, batch, same_as_plain
from _worker import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def case_one_forward_one_backward():
    pipeline = load("pipeline")
    same_as_plain(lambda policy: pipeline._train(policy, "Schedule1F1B"))


def case_sharded_replicas_of_split_layers():
    """Two processes share each layer, and two such pairs share the parameters: tensor parallel inside fully sharded."""

    def train(policy):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(0)
        model = Model()
        handle = apply(model, policy)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        torch.manual_seed(20 + dist.get_rank() // 2)
        seen = []
        for _ in range(3):
            model(batch()).square().mean().backward()
            seen += [p.grad.to_local().clone() for p in model.parameters()]
        return seen, handle

    same_as_plain(train)
