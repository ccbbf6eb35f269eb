"""What was one object among the arguments is one object in the replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lowtide


class AsksForIdentity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor, c: torch.Tensor | None = None, box: Any = ()) -> torch.Tensor:
        same = [
            a is b,
            a is c,
            *(a is other for other in more),
            *(a is other for other in (box.values() if isinstance(box, dict) else box)),
        ]
        for truth in same:
            a = torch.tanh(self.linear(a)) if truth else torch.sin(a).exp()
        return a * b.cos()


def gradients(module: nn.Module, call: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    y = torch.randn(3, 4)
    x.requires_grad_(), y.requires_grad_()
    module.zero_grad()
    for _ in range(3):
        call(module, x * 2, y * 3).sum().backward()
    return [t.grad.clone() for t in (x, y, *module.parameters()) if t.grad is not None]


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y: f(x, x),
        lambda f, x, y: f(x, y),
        lambda f, x, y: f(x, y, x, y),
        lambda f, x, y: f(x, y, c=x),
        lambda f, x, y: f(x, y, box=[x, y]),
        lambda f, x, y: f(x, x, box={"k": x, "l": y}),
    ],
)
def test_a_tensor_that_is_passed_twice_is_one_tensor_in_the_replay(call: Any) -> None:
    module = AsksForIdentity()
    plain = gradients(module, call)
    region = lowtide.checkpoint(module)
    replayed = gradients(module, lambda _, x, y: call(region, x, y))
    assert all(torch.equal(a, b) for a, b in zip(plain, replayed, strict=True))


def test_self_attention_takes_its_fast_path_in_the_replay() -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)

    def run(f: Any) -> list[torch.Tensor]:
        attention.zero_grad()
        for _ in range(3):
            h = x * 2
            f(h, h, h)[0].square().sum().backward()
        return [p.grad.clone() for p in attention.parameters() if p.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(run(attention), run(lowtide.checkpoint(attention)), strict=True))
