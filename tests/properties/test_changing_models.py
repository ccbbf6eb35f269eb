"""Models that change at random, before forward and between forward and backward, trained with regions and without: equal in every bit.

Where plain autograd computes a gradient, a region may say instead that what its replay reads was written to in place.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import lowtide

STEPS = 10


class Helper:
    """No module; reads numbers, a list, a tensor and a module of its own."""

    def __init__(self):
        self.scale, self.items, self.shift, self.module = 1.5, [1.0, 0.5], torch.rand(4), nn.Linear(4, 4)

    def __call__(self, x):
        for item in self.items:
            x = x * item
        return self.module(x) * self.scale + self.shift


class Busy(nn.Module):
    """Counts, logs, averages, draws, writes in place, and goes another way now and then."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3)
        self.scale, self.weights, self.helper, self.noisy = 2.0, [torch.rand(4)], Helper(), False
        self.count, self.log = 0, []
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        self.count += 1
        y = self.drop(self.norm(self.linear(x))) * self.scale
        with torch.no_grad():
            if self.training:
                self.average.mul_(0.9).add_(y.mean(0) * 0.1)
        for weight in self.weights:
            y = y * weight + self.average
        y = torch.tanh(self.helper(y))
        if self.noisy:
            y = y + random.random() * torch.sin(x)
        self.log = [*self.log[-3:], self.count]
        return nn.functional.relu(y + x, inplace=self.count % 3 == 0)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts, self.norm = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), nn.LayerNorm(4)
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.parts(self.norm(x)) * self.gain


class Loose:
    """No module; runs the modules in a list, and draws from a generator of its own."""

    def __init__(self):
        self.parts, self.rate = [nn.Linear(4, 4), nn.BatchNorm1d(4)], 1.0
        self.generator = torch.Generator().manual_seed(1)

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return torch.sin(x * self.rate) + torch.rand(4, generator=self.generator) * x


class Model:
    def __init__(self, region):
        self.first, self.second, self.loose, self.last = Busy(), Residual(), Loose(), Busy()
        self.blocks = [region(block) for block in (self.first, self.second, self.loose, self.last)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x * 1)
        return x

    def modules(self):
        trees = [self.first, self.second, self.last, self.first.helper.module, self.last.helper.module, *self.loose.parts]
        return [module for tree in trees for module in tree.modules()]

    def parameters(self):
        return [p for module in self.modules() for p in module.parameters(recurse=False)]

    def state(self):
        buffers = [b.clone() for module in self.modules() for b in module.buffers(recurse=False)]
        counts = [(block.count, tuple(block.log)) for block in (self.first, self.last)]
        return [*buffers, torch.get_rng_state(), self.loose.generator.get_state(), random.getstate(), counts]


def either(model, dice):
    return dice.choice([model.first, model.last])


def number(dice):
    return dice.choice([0.5, 1.0, 2.0])


def hook(model, dice):
    module = dice.choice(model.modules())
    handle = module.__dict__.pop("handle", None)
    if handle is None:
        module.__dict__["handle"] = module.register_forward_hook(lambda module, args, result: result * 1.5)
    else:
        handle.remove()


def one_more_or_less(parts, most, make):
    parts.pop() if len(parts) == most else parts.append(make())


def write(tensors, dice):
    with torch.no_grad():
        dice.choice(tensors).add_(0.01)


def switch(module):
    module.train(not module.training)


CHANGES = {
    "mode": lambda model, dice: switch(dice.choice(model.modules())),
    "scale": lambda model, dice: setattr(either(model, dice), "scale", number(dice)),
    "noise": lambda model, dice: setattr(either(model, dice), "noisy", dice.random() < 0.5),
    "weights": lambda model, dice: one_more_or_less(either(model, dice).weights, 3, lambda: torch.full((4,), number(dice))),
    "other weights": lambda model, dice: setattr(either(model, dice), "weights", [torch.full((4,), number(dice))]),
    "helper": lambda model, dice: setattr(either(model, dice), "helper", Helper()),
    "helper's scale": lambda model, dice: setattr(either(model, dice).helper, "scale", number(dice)),
    "helper's item": lambda model, dice: either(model, dice).helper.items.__setitem__(0, number(dice)),
    "helper's module": lambda model, dice: setattr(either(model, dice).helper, "module", nn.Linear(4, 4)),
    "rate": lambda model, dice: setattr(model.loose, "rate", number(dice)),
    "loose parts": lambda model, dice: one_more_or_less(model.loose.parts, 4, lambda: nn.Linear(4, 4)),
    "loose part": lambda model, dice: model.loose.parts.__setitem__(0, nn.Linear(4, 4)),
    "part": lambda model, dice: model.second.parts.__setitem__(1, dice.choice([nn.GELU, nn.Tanh, nn.SiLU])()),
    "parameter": lambda model, dice: setattr(model.second, "gain", nn.Parameter(torch.rand(4))),
    "parameter in place": lambda model, dice: write(model.parameters(), dice),
    "drawn": lambda model, dice: torch.rand(3),
    "drawn from its own": lambda model, dice: torch.rand(3, generator=model.loose.generator),
    "hook": hook,
    "loaded": lambda model, dice: model.first.load_state_dict({k: v.clone() for k, v in model.first.state_dict().items()}),
}
"""What may change at any time."""


def thaw_or_freeze(model, dice):
    parameter = dice.choice(model.parameters())
    parameter.requires_grad_(not parameter.requires_grad)


BEFORE = {
    **CHANGES,
    "frozen": thaw_or_freeze,
    "buffer in place": lambda model, dice: write([b for m in model.modules() for b in m.buffers() if b.is_floating_point()], dice),
}


def backward(model, x, way, dice, between):
    """A forward, what changes after it, and a backward."""
    if way == "no gradients":
        with torch.no_grad():
            model(x)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        losses = [model(x).float().square().sum()]
    if way == "twice":
        losses.append(model(x * 2).sum())
    for change in between:
        CHANGES[change](model, dice)
    if way == "of some":
        torch.autograd.grad(losses[0], [x, *(p for p in model.parameters() if p.requires_grad)], allow_unused=True, retain_graph=True)
    if dice.random() < 0.5:
        losses.reverse()
    for loss in losses:
        loss.backward(retain_graph=way == "again")
        if way == "again":
            loss.backward()


def train(seed, region):
    """What each step leaves, up to where autograd finds something written to; what had changed in that step before backward."""
    random.seed(seed)
    torch.manual_seed(seed)
    dice = random.Random(seed)
    model, seen = Model(region), []
    for _ in range(STEPS):
        way = dice.choice(["once", "once", "twice", "of some", "again", "no gradients", "frozen input", "autocast"])
        between = dice.choices([*CHANGES], k=dice.choice([0, 0, 1, 2]))
        for change in dice.choices([*BEFORE], k=dice.choice([0, 1, 2])):
            BEFORE[change](model, dice)
        x = torch.randn(3, 4, requires_grad=way != "frozen input")
        later = random.Random(dice.random())
        try:
            backward(model, x, way, later, between)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return seen, between
        seen.append([x.grad, *(p.grad for p in model.parameters()), *model.state()])
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
                parameter.grad = None
    return seen, None


def same(found, expected):
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found.nan_to_num(), expected.nan_to_num())
    return bool(found == expected)


@pytest.mark.parametrize("seed", range(40))
def test_a_model_that_changes(seed):
    plain, _ = train(seed, lambda block: block)
    replayed, changed = train(seed, lowtide.checkpoint)
    assert same(replayed, plain[: len(replayed)])
    if changed is not None:  # the gradient of a sum does not need its terms, but the replay of what follows does
        assert {"parameter in place", "loaded"} & {*changed}
