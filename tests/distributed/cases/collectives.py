"""Processes that exchange tensors inside regions, in place, as users write it: PyTorch does not say that these ops write."""

from __future__ import annotations

import torch
import torch.distributed as dist
from _training import WIDTH, apply, batch, descend, gradients, same_as_plain, seed
from torch import nn


class Exchanging(nn.Module):
    """Multiplies by a mean of what all processes have."""

    def __init__(self, exchange) -> None:
        super().__init__()
        self.linear, self.exchange = nn.Linear(WIDTH, WIDTH), exchange
        self.register_buffer("average", torch.ones(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        mean = self.exchange(y.detach().mean((0, 1)))
        self.average.lerp_(mean, 0.1)
        return x + y * mean * self.average.clone()


def reduced(mean):
    dist.all_reduce(mean)
    return mean


def reduced_later(mean):
    work = dist.all_reduce(mean, async_op=True)
    work.wait()
    return mean


def broadcast(mean):
    dist.broadcast(mean, 0)
    return mean


def gathered(mean):
    found = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mean)
    return torch.stack(found).prod(0)


def gathered_at_once(mean):
    found = mean.new_empty(dist.get_world_size() * WIDTH)
    dist.all_gather_into_tensor(found, mean)
    return found.view(-1, WIDTH).prod(0)


def scattered(mean):
    found = mean.new_empty(WIDTH // dist.get_world_size())
    dist.reduce_scatter_tensor(found, mean)
    return found.repeat(dist.get_world_size())


def _compare(exchange):
    same_as_plain(lambda policy: _trained(policy, exchange))


def _trained(policy, exchange):
    torch.manual_seed(0)
    model = nn.Sequential(*(Exchanging(exchange) for _ in range(3)))
    handle = apply(model, policy)
    seed()
    seen = []
    for _ in range(4):
        model(batch()).square().mean().backward()
        seen += [*gradients(model.parameters()), *(buffer.clone() for buffer in model.buffers())]
        descend(model.parameters())
    return seen, handle


def case_reduced():
    _compare(reduced)


def case_reduced_later():
    _compare(reduced_later)


def case_broadcast():
    _compare(broadcast)


def case_gathered():
    _compare(gathered)


def case_gathered_at_once():
    _compare(gathered_at_once)


def case_scattered():
    _compare(scattered)
