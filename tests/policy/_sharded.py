"""A process of ``test_order``: ``_sharded.py RANK WORLD STORE`` ends with status 0 if every gradient is that of the plain run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.policy import apply


def _trained(policy: str | None, first: bool, mesh) -> list[torch.Tensor]:
    from _models import llama
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = llama(3)
    handle = apply(model, policy) if policy is not None and first else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if policy is not None and not first:
        handle = apply(model, policy)
    torch.manual_seed(1 + dist.get_rank())
    seen = []
    for _ in range(3):
        model.zero_grad()
        loss = model(torch.randn(2, 5, 8))
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    assert handle is None or handle.replay_seconds() > 0
    return seen


def _compare(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,))
    plain = _trained(None, True, mesh)
    for policy in ("full", "selective", "megatron_uniform:3"):
        for first in (True, False):
            found = _trained(policy, first, mesh)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (policy, first)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _compare(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
