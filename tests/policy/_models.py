"""Small models whose calls can be counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.policy._policy import Policy, Run
from lowtide.policy._rules import Around
from lowtide.records import CallSite, Decision

WIDTH = 8


class Attention(nn.Module):
    """Four products without biases, and attention as one call."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(lowtide.name(mixed.transpose(1, 2).flatten(2), "mixed"))


class ByHand(nn.Module):
    """Attention of two batched products and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = lowtide.name(torch.softmax(q @ k.transpose(-1, -2), -1), "scores")
        return self.out(scores @ v)


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(WIDTH, 16, bias=False), nn.Linear(16, WIDTH, bias=False), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Router(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)

    def forward(self, x):
        weights, chosen = torch.softmax(self.gate(x), -1).topk(2, -1)
        return weights, chosen


class MoE(nn.Module):
    """Two of four experts for each token, and one expert for all."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(4)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(4))
        self.shared_experts = SwiGLU()

    def forward(self, x):
        weights, chosen = self.router(x)
        result = self.shared_experts(x)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            result = result + share * expert(x)
        return result


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module] = Attention, inner: type[nn.Module] = SwiGLU, name: str = "mlp") -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner_name = name
        setattr(self, name, inner())

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + getattr(self, self.inner_name)(self.norm(x))


class Stack(nn.Module):
    """``[2, 5, 8]`` through blocks, to a loss."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv1d(5, 5, 3, padding=1), nn.BatchNorm1d(5), nn.ReLU(), nn.Conv1d(5, 5, 1)) for _ in range(2)
        )

    def forward(self, x):
        for stage in self.stages:
            x = x + stage(x)
        return x.square().mean()


def llama(blocks: int = 2) -> Stack:
    return Stack(*(Block() for _ in range(blocks)))


def by_hand(blocks: int = 2) -> Stack:
    return Stack(*(Block(ByHand) for _ in range(blocks)))


def moe(blocks: int = 2) -> Stack:
    return Stack(*(Block(inner=MoE, name="moe") for _ in range(blocks)))


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "by hand": by_hand, "moe": moe, "convolutions": Convolutions}


def inputs() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


class Noting(Around):
    """Notes what another policy decides. Not a value, as tests need none."""

    def vote(self, site: CallSite, run: Run) -> Decision | None:
        vote = self.policy.vote(site, run)
        NOTED.append((site, vote is Decision.KEEP))
        return vote


NOTED: list[tuple[CallSite, bool]] = []


def decided(model: nn.Module, policy: Policy | str, x: torch.Tensor | None = None) -> list[tuple[CallSite, bool]]:
    """Every call of the model's regions in one step, and whether it is kept."""
    handle = lowtide.apply(model, Noting(lowtide.policy.read_policy(policy)))
    try:
        model(inputs() if x is None else x).backward()
    finally:
        handle.remove()
        noted = [*NOTED]
        NOTED.clear()  # tests that measure count what is alive
    return noted


def short(site: CallSite) -> str:
    """``mlp.w1 linear``: the module below its block, and the function."""
    path = ".".join(site.module.split(".")[2:])
    name = type(site.function).__name__ if site.level == "module" else site.function.__name__
    return f"{path} {name}".strip()


def kept_in(model: nn.Module, policy: Policy | str, block: int = 0) -> list[str]:
    """What is kept in a block, in order."""
    return [short(site) for site, kept in decided(model, policy) if kept and site.module.split(".")[1] == str(block)]


class OpsOf(TorchDispatchMode):
    """Counts the ops of a step, those of its backward apart."""

    def __init__(self) -> None:
        super().__init__()
        self.forward: list[str] = []
        self.backward: list[str] = []
        self._now = self.forward

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._now.append(str(func))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        self._now = self.backward
        yield


def ops_in_backward(model: nn.Module, policy: Policy | str) -> list[str]:
    """Ops that run in the backward of the third step: those of autograd, and those that are replayed."""
    handle = lowtide.apply(model, policy)
    try:
        for _ in range(2):
            model(inputs()).backward()
        with OpsOf() as ops:
            loss = model(inputs())
            with ops.in_backward():
                loss.backward()
    finally:
        handle.remove()
    return ops.backward
