"""Replicas whose gradients are averaged."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import torch
import torch.distributed as dist
from _training import WIDTH, Block, Model, apply, batch, descend, gradients, same_as_plain, seed
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


class Shared(Model):
    """One block at two places, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = Block()

    def forward(self, x, use=True):
        x = self.blocks(torch.sin(self.blocks(self.first(x))))
        return self.last(self.sometimes(x) if use else x)


def _replicas(kind, policy, **options):
    torch.manual_seed(0)
    model = kind()
    handle = apply(model, policy)
    ddp = DistributedDataParallel(model, **options)
    seed()
    return ddp, handle


def _shared(policy, used, **options):
    ddp, handle = _replicas(Shared, policy, **options)
    seen = []
    for step in range(4):
        ddp(batch(), used(step)).square().mean().backward()
        seen += gradients(ddp.parameters())
        descend(ddp.parameters())
    return seen, handle


def case_a_shared_block():
    same_as_plain(lambda policy: _shared(policy, lambda _: True))


def case_find_unused_parameters():
    """Which block is left out differs between processes and steps."""
    same_as_plain(lambda policy: _shared(policy, lambda step: (step + dist.get_rank()) % 2 == 0, find_unused_parameters=True))


def case_static_graph():
    same_as_plain(lambda policy: _shared(policy, lambda _: True, static_graph=True))


def case_gradients_in_buckets():
    same_as_plain(lambda policy: _shared(policy, lambda _: True, gradient_as_bucket_view=True, bucket_cap_mb=0.001))


def case_accumulation_without_synchronising():
    def train(policy):
        ddp, handle = _replicas(Model, policy)
        seen = []
        for _ in range(2):
            for part in range(3):
                with ddp.no_sync() if part < 2 else nullcontext():
                    ddp(batch()).square().mean().backward()
                seen += gradients(ddp.parameters())
            descend(ddp.parameters())
        return seen, handle

    same_as_plain(train)


def case_hooks_fire_once():
    """One average for each bucket, one gradient for each parameter, as in the plain run."""

    def train(policy):
        ddp, handle = _replicas(Model, policy, bucket_cap_mb=0.001)
        fired = Counter()

        def average(_, bucket):
            fired["buckets"] += 1
            return dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future().then(lambda f: f.value()[0])

        ddp.register_comm_hook(None, average)
        for index, parameter in enumerate(ddp.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: fired.update([index]))
        for _ in range(3):
            ddp(batch()).square().mean().backward()
        parameters = list(ddp.parameters())
        assert [fired[index] for index in range(len(parameters))] == [3] * len(parameters)
        return [*gradients(parameters), torch.tensor(fired["buckets"])], handle

    same_as_plain(train)


def case_installed_on_the_replica():
    """Regions on the model inside, after it was wrapped."""

    def train(policy):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Model())
        handle = apply(ddp.module, policy)
        seed()
        ddp(batch()).square().mean().backward()
        return gradients(ddp.parameters()), handle

    same_as_plain(train)


def case_batch_norm_statistics():
    """Buffers are sent to all before every forward, and written once a step."""

    def train(policy):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(3)))
        handle = apply(model, policy)
        ddp = DistributedDataParallel(model)
        seed()
        for _ in range(3):
            ddp(torch.randn(6, WIDTH)).square().mean().backward()
        return [*gradients(ddp.parameters()), *(buffer.clone() for buffer in ddp.buffers())], handle

    same_as_plain(train, ["full"])


def case_optimizer_state_split():
    """ZeRO-1: each process updates its share of the parameters."""

    def train(policy):
        ddp, handle = _replicas(Model, policy)
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01)
        seen = []
        for _ in range(3):
            optimizer.zero_grad()
            ddp(batch()).square().mean().backward()
            optimizer.step()
            seen += [parameter.detach().clone() for parameter in ddp.parameters()]
        return seen, handle

    same_as_plain(train)
