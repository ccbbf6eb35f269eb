"""Accelerate needs nothing of its own: a policy may be applied before or after ``prepare``."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide

from ._libraries import OTHERS_WARNINGS, library

accelerate = library("accelerate")
pytestmark = pytest.mark.filterwarnings(*OTHERS_WARNINGS)


def trained(applied, precision):
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))
    handle = lowtide.apply(model, "full") if applied == "before" else None
    optimizer, data = torch.optim.AdamW(model.parameters(), 1e-2), DataLoader(TensorDataset(torch.randn(16, 8)), 4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    handle = lowtide.apply(model, "full") if applied == "after" else handle
    for (batch,) in data:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
    assert (handle is None) == (applied is None)
    assert handle is None or (len(handle.regions) == 3 and handle.replay_seconds() > 0)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    return list(model.state_dict().values())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("applied", ["before", "after"])
def test_the_training_is_the_plain_one(applied, precision):
    found, expected = trained(applied, precision), trained(None, precision)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
