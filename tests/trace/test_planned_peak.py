"""What a traced step is said to need under a plan is what it then needs, by the allocator's events."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import lowtide
from lowtide.measure import peak_bytes

BLOCKS = 4


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(32, 128), nn.Linear(128, 32), kind
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "writes to its input":
            x = x.mul_(1.5)
        h = torch.tanh(self.up(x))
        if self.kind == "keeps what it made inside":
            self.last = (h * 2).detach()
        y = torch.sin(self.down(torch.sigmoid(h) * h)) + x
        if self.kind == "reads what it kept":
            y = y + 0.1 * self.last
        if self.kind in ("keeps its output", "reads what it kept"):
            self.last = y.detach()
        return y


AUTOCAST = ("runs under autocast", "runs twice under autocast")
KINDS = [
    *("computes", "writes to its input", *AUTOCAST),
    *("keeps its output", "keeps what it made inside", "reads what it kept"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_peak_under_a_plan_is_as_simulated(kind: str) -> None:
    blocks = [Block(kind) for _ in range(BLOCKS)] * (2 if kind == "runs twice under autocast" else 1)
    model = nn.Sequential(nn.Linear(32, 32), *blocks, nn.Linear(32, 32))
    x = torch.randn(1024, 32)

    def step() -> torch.Tensor:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16) if kind in AUTOCAST else contextlib.nullcontext():
            out = model(x)
        loss = out.float().square().mean()
        loss.backward()
        return loss.detach()

    step()
    step()  # from here on what is kept has the shape that it will have
    traced = lowtide.trace(model, step)
    regions = tuple(lowtide.PlannedRegion((str(index),)) for index in range(1, BLOCKS + 1))
    handle = lowtide.apply(model, lowtide.Plan(regions, lowtide.fingerprint(model), 0, 0, 0.0, 0.0, "by hand"))
    for _ in range(3):  # the first calls are watched
        step()
    resident = sum(storage.bytes for storage in traced.storages if storage.resident)
    measured = peak_bytes(step, torch.device("cpu"), resident)
    handle.remove()
    assert lowtide.simulate(traced, regions).peak_bytes == pytest.approx(measured, rel=0.002)
