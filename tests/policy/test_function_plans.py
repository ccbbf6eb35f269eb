"""Plans with calls of functions among the members of regions: gradients bit for bit, and the peak that was predicted, byte for byte."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.measure import peak_bytes
from lowtide.plan import Plan, PlannedRegion, _candidates, simulate, smallest_budget, solve
from lowtide.plan._candidates import candidates
from lowtide.plan._index import TraceIndex
from lowtide.records import StepTrace
from lowtide.workloads.resnet import ResNet
from lowtide.workloads.unet import UNet


class Encoder(nn.Module):
    """PyTorch's layers call functions between their modules."""

    def __init__(self) -> None:
        super().__init__()
        options = {"d_model": 16, "nhead": 2, "dim_feedforward": 64, "dropout": 0.1, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**options) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Classes(nn.Module):
    """Functions and modules by turns: a function saves what another one is given, and what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1), nn.Linear(16 * 8 * 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.avg_pool2d(torch.tanh(F.relu(self.conv2(x))), 2)
        return self.out(F.dropout(x.flatten(1), 0.2))


class Counted(nn.Module):
    """Of the calls of one function some run no op, and some record no gradients: they count all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x.contiguous())
        with torch.no_grad():
            self.seen = y.transpose(1, 2).contiguous().sum()
        return self.other(y.sin().contiguous().transpose(1, 2).contiguous())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "long skips": (lambda: UNet(widths=(8, 16, 24)), (8, 3, 32, 32)),
    "in place": (lambda: ResNet(widths=(8, 16), depths=(2, 2)), (8, 3, 32, 32)),
    "layers of PyTorch": (Encoder, (8, 32, 16)),
    "functions by turns": (Classes, (16, 3, 32, 32)),
    "calls that do nothing": (Counted, (32, 64, 16)),
}


class Subject:
    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        make, shape = MODELS[name]
        self.model, self.x = make(), torch.randn(shape)
        self.buffers = [buffer.clone() for buffer in self.model.buffers()]
        self.step()
        self.trace = lowtide.trace(self.model, self.step)
        self.resident = sum(storage.bytes for storage in self.trace.storages if storage.resident)

    def step(self) -> None:
        torch.manual_seed(1)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.model(self.x).square().sum().backward()

    def results(self) -> list[torch.Tensor]:
        """Gradients and buffers after one step."""
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self.buffers, strict=True):
                buffer.copy_(before)
        self.step()
        return [*(p.grad.clone() for p in self.model.parameters()), *(b.clone() for b in self.model.buffers())]

    def check_peak(self, predicted: int) -> None:
        """It is as predicted, but for the statistics of batch norms, which regions keep as they were."""
        gc.collect()
        more = peak_bytes(self.step, torch.device("cpu"), self.resident) - predicted
        assert 0 <= more <= sum(buffer.nbytes for buffer in self.buffers)


def steady(trace: StepTrace) -> StepTrace:
    """With times that are the same on every machine: by what an op makes."""
    ops = (dataclasses.replace(op, seconds=1e-3 + 1e-9 * op.born_bytes) for op in trace.ops)
    return dataclasses.replace(trace, ops=tuple(ops))


def functions_of(regions: tuple[PlannedRegion, ...]) -> list[str]:
    return [path for r in regions for path in [*(p for p in r.paths if ":" in p), *functions_of(r.inside)]]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "calls that do nothing"])  # of which no plan makes use
def test_what_is_planned_is_what_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_candidates, "first_saved", lambda index, replays: [])  # which often takes the place of functions
    subject = Subject(name)
    plain = subject.results()
    trace = steady(subject.trace)
    before, lowest = simulate(trace, None).peak_bytes, smallest_budget(trace)
    plans = [lowest, *(solve(trace, lowest.predicted_peak_bytes + (before - lowest.predicted_peak_bytes) * i // 4) for i in (1, 2, 3))]
    assert any(functions_of(plan.regions) for plan in plans)
    for plan in plans:
        handle = lowtide.apply(subject.model, plan)
        for _ in range(3):
            assert all(map(torch.equal, subject.results(), plain))
        subject.check_peak(plan.predicted_peak_bytes)
        assert plan.predicted_peak_bytes <= plan.budget_bytes
        handle.remove()
    assert all(map(torch.equal, subject.results(), plain))


def regions_of_one(trace: StepTrace) -> list[PlannedRegion]:
    found = (candidate.region for candidate in candidates(TraceIndex(trace)).regions)
    return [region for region in found if functions_of((region,)) and not region.kept]


@pytest.mark.parametrize("name", MODELS)
def test_each_region_by_itself_has_the_peak_that_is_simulated(name: str) -> None:
    subject = Subject(name)
    plain = subject.results()
    found = regions_of_one(subject.trace)
    assert found
    for region in found[:: max(len(found) // 12, 1)]:
        handle = lowtide.apply(subject.model, Plan((region,), subject.trace.fingerprint, 0, 0, 0.0, 0.0, "by hand"))
        for _ in range(2):
            assert all(map(torch.equal, subject.results(), plain))
        subject.check_peak(simulate(subject.trace, [region]).peak_bytes)
        handle.remove()


def test_the_smallest_peak_of_long_skips_is_far_below_that_of_every_block() -> None:
    subject = Subject("long skips")
    blocks = [PlannedRegion((path,)) for path in ("down.0", "down.1", "bottom", "up.0", "up.1")]
    every = simulate(subject.trace, blocks).peak_bytes - subject.resident
    assert smallest_budget(steady(subject.trace)).predicted_peak_bytes - subject.resident < 0.85 * every
