"""Tensors of inference mode among inputs of regions: they count no versions, and autograd takes them as long as it need not save them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import Options, install


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())


def doubled_in_inference_mode(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x * 2


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled_in_inference_mode(x)


def a_module(region, module):
    return region(module)


def a_function(region, module):
    return region(lambda x: module(x) * 2)


def passed_twice(region, module):
    run = region(lambda x, y: module(x) * (y + 1))
    return lambda x: run(x, x)


def in_containers(region, module):
    run = region(lambda x=None, batch=None: module(x) + batch["x"].clone())
    return lambda x: run(x=x, batch={"x": x})


def in_a_closure(region, module):
    seen = []
    run = region(lambda: module(seen[-1]))

    def call(x):
        seen.append(x)
        return run()

    return call


def in_an_outer_region(region, module):
    inner = region(module)
    return region(lambda x: torch.tanh(inner(x)))


def made_in_an_outer_region(region, module):
    inner = region(module)
    return region(lambda x: torch.tanh(inner(doubled_in_inference_mode(x))))


def under_other_hooks(region, module):
    run = region(module)

    def call(x):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
            return run(x)

    return call


@pytest.mark.parametrize(
    "made",
    [
        a_module, a_function, passed_twice, in_containers, in_a_closure, in_an_outer_region, made_in_an_outer_region, under_other_hooks,
    ],
)  # fmt: skip
def test_a_tensor_of_inference_mode(compare, made):
    def scenario(region):
        module = layers()
        run = made(region, module)
        seen = []
        for _ in range(5):
            with torch.inference_mode():
                x = torch.randn(3, 4)
            module.zero_grad()
            run(x).square().sum().backward()
            seen.append([p.grad.clone() for p in module.parameters()])
        return seen

    compare(scenario)


@pytest.mark.parametrize("whole", [False, True])
def test_one_that_a_member_of_a_segment_returns(whole):
    found = []
    for installed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Doubled(), *layers(), nn.Linear(4, 4))
        handle = install(list(model.named_children())[: None if whole else 3], Options()) if installed else None
        for _ in range(5):
            model(torch.randn(3, 4)).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
        if handle is not None:
            handle.remove()
    assert all(map(torch.equal, *found))


def test_plain_autograd_refuses_to_save_one_and_so_does_a_region():
    linear = nn.Linear(4, 4)
    with torch.inference_mode():
        x = torch.randn(3, 4)
    for run in (linear, lowtide.checkpoint(linear)):
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            run(x)
