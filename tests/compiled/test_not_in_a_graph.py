"""Where the compiler gives up, Python runs the region and the engine replays it; and compiled code inside regions."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
import lowtide.torch_compat

from ._models import Block, Counter, Gradient, GraphBreak, Item, Log, PythonRandom, kept_bytes, stack, steps

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]
SAID = "could not take region"


@pytest.mark.parametrize("kind", [GraphBreak, PythonRandom, Counter, Log, Item, Gradient])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_gradients_are_those_of_python_and_the_reason_is_said(kind, policy):
    plain, model = stack(kind), stack(kind)
    lowtide.apply(model, policy)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = steps(torch.compile(model, backend="aot_eager"), model)
    # From 2.14 on the compiler draws Python's numbers for a graph as Python does.
    in_graph = kind is PythonRandom and not torch.__version__.startswith(("2.11", "2.12", "2.13"))
    assert any(SAID in str(warning.message) for warning in said) is not in_graph
    for one, other in zip(found, steps(plain, plain), strict=True):
        assert torch.equal(one, other)


def test_one_region_that_breaks_leaves_the_others_in_graphs_and_saves_as_much():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), GraphBreak(), Block())
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=backend)
    lowtide.apply(model, lowtide.policy.by_layer_type({Block: lowtide.policy.full(), GraphBreak: lowtide.policy.full()}))
    with pytest.warns(UserWarning, match=rf"{SAID} '1' into a graph \(Call to `torch._dynamo.graph_break") as said:
        steps(compiled, model)
    assert len([warning for warning in said if SAID in str(warning.message)]) == 1
    assert backend.frame_count > 0
    assert kept_bytes(compiled) == kept_bytes(model)


def test_compiled_code_inside_a_region_stays_compiled():
    backend, linear = CompileCounterWithBackend("aot_eager"), nn.Linear(8, 8)

    def body(x):
        return torch.sin(linear(x)).cos()

    region = lowtide.checkpoint(torch.compile(body, backend=backend))
    x = torch.randn(4, 8, requires_grad=True)
    expected = torch.autograd.grad(body(x).sum(), [x, *linear.parameters()])
    for _ in range(3):
        found = torch.autograd.grad(region(x).sum(), [x, *linear.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert backend.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_backward_called_by_a_compiled_step_replays_as_forward_ran():
    model, plain = stack(Block), stack(Block)
    lowtide.apply(model, "full")
    step = torch.compile(lambda loss: loss.backward(), backend="aot_eager")
    for rows in (4, 4, 6):
        x = torch.randn(rows, 16, requires_grad=True)
        step(model(x).sum())
        plain(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_library_that_checkpoints_what_the_compiler_cannot_take_runs_on_the_engine():
    def body(x):
        return torch.sin(x) * random.random()

    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x: torch.utils.checkpoint.checkpoint(body, x, use_reentrant=False), backend="aot_eager")
    with lowtide.torch_compat.substituted():
        random.seed(1)
        found = torch.autograd.grad(compiled(x).sum(), x)[0]
    random.seed(1)
    assert torch.equal(found, torch.autograd.grad(body(x).sum(), x)[0])


def test_regions_on_modules_that_are_compiled():
    plain, model = stack(Block), stack(Block)
    for index in range(len(model)):
        model[index] = torch.compile(model[index], backend="aot_eager")
    lowtide.apply(model, "full")
    for one, other in zip(steps(model, model), steps(plain, plain), strict=True):
        assert torch.equal(one, other)
