"""Small models for the compiler, and what to compare of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import profile

import lowtide

WIDTH = 16


class Block(nn.Module):
    """A residual block; others replace its ``body``."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Transformer(Block):
    """With attention, a norm and names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.reshape(1, 2, -1, WIDTH // 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).reshape(x.shape)
        return self.down(lowtide.name(F.gelu(lowtide.name(self.up(self.norm(x)), "up")), "act"))


class GraphBreak(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return self.down(torch.relu(y))


class PythonRandom(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return random.random() * super().body(x)


class Counter(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.calls % 3) * super().body(x)


class Log(Block):
    """Fills a list, as a region in a graph cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(1)
        return len(self.log) * super().body(x)


class Item(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return self.down(torch.relu(y * 2 if y.sum().item() > 0 else y))


class Gradient(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(torch.autograd.grad((x**2).sum(), x, create_graph=True)[0])


class Statistics(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


class Dropout(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(torch.relu_(self.up(x))), 0.3)


class Inner(Block):
    """A region in a region."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = lowtide.checkpoint(lambda x: torch.sin(self.up(x)))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x))


class Autocast(Block):
    def body(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().body(x).float()


def stack(kind: Callable[[], nn.Module], count: int = 3) -> nn.Sequential:
    """The same weights whenever it is called."""
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(count)])


def steps(run: Callable[[torch.Tensor], torch.Tensor], model: nn.Module, rows: tuple[int, ...] = (8, 8, 5, 8)) -> list[torch.Tensor]:
    """Losses, gradients and buffers of a few steps, on batches of these sizes."""
    torch.manual_seed(1)
    random.seed(1)
    found: list[torch.Tensor] = []
    for count in rows:
        x = torch.randn(count, WIDTH, requires_grad=True)
        model.zero_grad()
        loss = run(x).square().sum()
        loss.backward()
        parts: list[Any] = [loss.detach(), x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
        found += [part.clone() for part in parts if part is not None]
    return found


def kept_bytes(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """What a forward leaves allocated for its backward, its loss included."""
    x = torch.randn(8, WIDTH, requires_grad=True)
    run(x).sum().backward()
    with profile(profile_memory=True, acc_events=True) as measured:
        loss = run(x).sum()
    del loss
    return sum(event.self_cpu_memory_usage for event in measured.key_averages())
