"""A small model, trained with and without regions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide

WIDTH = 8
POLICIES = ("full", "selective")


class Block(nn.Module):
    """``[batch, time, 8]`` to the same: attention and a gated MLP, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.gate, self.down = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        x = x + self.dropout(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        normed = self.norm(x)
        return x + self.dropout(self.down(F.silu(self.gate(normed)) * self.up(normed)))


class Model(nn.Module):
    """Blocks between a layer of its own at either end."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def batch(rows: int = 2) -> Tensor:
    """Other data on every process, the same whenever the seed is."""
    return torch.randn(rows, 5, WIDTH)


def seed(offset: int = 0) -> None:
    """A random state of this process."""
    torch.manual_seed(10 + 100 * offset + dist.get_rank())


def whole(tensor: Any) -> Tensor:
    """A tensor that may be spread over processes."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Copies; an empty tensor where there is none."""
    return [torch.empty(0) if p.grad is None else whole(p.grad) for p in parameters]


def descend(parameters: Iterable[Tensor]) -> None:
    """A step down the gradient, which is then forgotten."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


Trained = tuple[Sequence[Tensor], Any]


def same_as_plain(train: Callable[[Any], Trained], policies: Iterable[Any] = POLICIES, *, replays: bool = True) -> None:
    """Train without regions and under policies.

    Args:
        train: takes a policy or ``None``; gives back tensors to compare bit for bit, and what installs regions gave (``replay_seconds``).
        policies: to train under.
        replays: the engine has to have replayed something.
    """
    expected, _ = train(None)
    assert expected
    for policy in policies:
        found, handle = train(policy)
        assert len(found) == len(expected), policy
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(one, other), f"{policy}: tensor {index} of {len(found)} differs by {(one - other).abs().max()}"
        assert (handle.replay_seconds() > 0) is replays, policy


def apply(model: nn.Module, policy: str | None) -> lowtide.policy.Handle | None:
    """Install a policy, if there is one."""
    return None if policy is None else lowtide.apply(model, policy)
