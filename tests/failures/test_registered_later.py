"""What is registered on a module after a region ran for the first time: the call that runs it first is watched again."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import lowtide


class _Noise(nn.Module):
    """Draws from where torch does not look."""

    def forward(self, weight):
        return weight * (1 + random.random())


class _Count(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight * self.calls


class _Buffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, weight):
        self.scale.mul_(1.5)
        return weight * self.scale.clone()


REGISTERED = {
    "noise": lambda layer: parametrize.register_parametrization(layer, "weight", _Noise()),
    "count": lambda layer: parametrize.register_parametrization(layer, "weight", _Count()),
    "buffer": lambda layer: parametrize.register_parametrization(layer, "weight", _Buffer()),
    "spectral norm": parametrizations.spectral_norm,
    "old spectral norm": spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def _train(register, at: int, install) -> list[torch.Tensor]:
    torch.manual_seed(0)
    random.seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    run, found = install(model), []
    for step in range(5):
        if step == at:
            register(model[2])
        model.zero_grad()
        x = torch.randn(4, 8, requires_grad=True)
        run(x).square().sum().backward()
        found += [x.grad, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    return found


def _applied(policy):
    def install(model):
        lowtide.apply(model, lowtide.policy.by_layer_type({"Sequential": lowtide.policy.read_policy(policy)}))
        return model

    return install


INSTALLED = {"by hand": lowtide.checkpoint, "full": _applied("full"), "selective": _applied("selective")}


@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.spectral_norm")
@pytest.mark.parametrize("at", [1, 3])
@pytest.mark.parametrize("install", INSTALLED.values(), ids=list(INSTALLED))
@pytest.mark.parametrize("register", REGISTERED.values(), ids=list(REGISTERED))
def test_training_goes_on_as_without_a_region(register, install, at):
    expected = _train(register, at, lambda model: model)
    for one, other in zip(_train(register, at, install), expected, strict=True):
        assert torch.equal(one, other)
