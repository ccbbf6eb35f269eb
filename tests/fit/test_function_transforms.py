"""Steps that use transforms of ``torch.func`` beside layers whose activations are to be dropped."""

from __future__ import annotations

import torch
from torch import nn

import lowtide


def test_a_step_with_a_function_transform_is_fitted():
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    head = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 1))
    model = nn.ModuleDict({"blocks": blocks, "head": head})
    x = torch.randn(128, 64)

    def step() -> torch.Tensor:
        model.zero_grad()
        h = blocks(x)
        slopes = torch.func.vmap(torch.func.grad(lambda row: head(row).sum()))(h)
        loss = slopes.pow(2).mean() + head(h).mean()
        loss.backward()
        return loss.detach()

    loss = step()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    fitted = lowtide.fit(model, step, "60% of activations", rounds=1)
    try:
        assert fitted.peak_bytes <= fitted.budget_bytes < fitted.plain.peak_bytes
        assert fitted.verified
        assert step().equal(loss)
        assert all(p.grad.equal(g) for p, g in zip(model.parameters(), plain, strict=True))
    finally:
        fitted.handle.remove()
