"""What ``verify`` compares with what, that it passes where nothing is wrong, and that it leaves all as it was."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lowtide
from lowtide.trace import find_optimizers
from lowtide.verify import same_bits
from lowtide.workloads import bundled

SMALL = {
    "gpt": {"blocks": 3, "width": 32, "heads": 2, "context": 16, "batch": 2, "corpus_bytes": 2**16},
    "resnet": {"batch": 2, "widths": (4, 8), "depths": (2, 2)},
    "unet": {"batch": 1, "widths": (4, 8)},
}


@pytest.mark.parametrize("name", SMALL)
def test_bundled_workloads_are_equal_with_every_part_a_region(name):
    workload = bundled(name, **SMALL[name])
    found = lowtide.verify(workload.model, workload.step, steps=2)
    assert found.equal, found.report()
    assert found.repeatable
    assert found.gradients == sum(p.requires_grad for p in workload.model.parameters())
    assert len(found.regions) > 3
    found.raise_if_different()


@pytest.mark.parametrize("policy", ["full", "every:2", "sqrt", "plan:95%"])
def test_policies_are_put_in_force_and_taken_out_again(policy):
    workload = bundled("gpt", **SMALL["gpt"])
    found = lowtide.verify(workload.model, workload.step, policy=policy, steps=2)
    assert found.equal, found.report()
    assert all("blocks." in region for region in found.regions)
    assert "forward" not in workload.model.blocks[0].__dict__


def test_a_plan_is_put_in_force(net):
    model, step = net()
    plan = lowtide.Plan((lowtide.PlannedRegion(("blocks.1",)),), lowtide.fingerprint(model), 0, 0, 0.0, 0.0, "by hand")
    found = lowtide.verify(model, step, plan=plan, steps=1)
    assert found.equal
    assert found.regions == ("blocks.1",)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_step_checkpoints_itself_is_compared_with_the_step_without_that(net, reentrant):
    calls = []

    def by_torch(block, x):
        calls.append(torch.is_grad_enabled())
        return checkpoint(block, x.requires_grad_() if x.is_leaf else x, use_reentrant=reentrant)

    found = lowtide.verify(*net(call=by_torch), steps=1)
    assert found.equal
    assert found.regions == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")


def test_regions_by_hand_are_compared_with_the_step_without_them(net):
    model, step = net(call=lambda block, x: lowtide.checkpoint(block, name="by hand")(x))
    assert lowtide.verify(model, step, steps=1).regions == ("by hand",)


def test_the_state_is_left_as_it_was(net):
    def draws(_, h):
        return h * random.random() * np.random.rand()

    model, step = net(draws)
    step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    [optimizer] = find_optimizers(model)
    moments = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    drawn = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    lowtide.verify(model, step, three_way=True)
    assert all(same_bits(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(same_bits(grad, parameter.grad) for grad, parameter in zip(grads, model.parameters(), strict=True))
    assert len(moments) == len(grads)
    assert all(map(same_bits, moments, (state["momentum_buffer"] for state in optimizer.state.values())))
    assert torch.equal(drawn[0], torch.get_rng_state())
    assert drawn[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.utils.checkpoint.CheckpointFunction.__module__ == "torch.utils.checkpoint"


def test_gradients_of_every_step_count(net):
    """A fault that begins with the second step is found, and told apart from one in the first."""
    seen = []

    def late(block, h):
        seen.append(lowtide.is_replaying())
        return torch.sin(h * (2.0 if lowtide.is_replaying() and block.up.weight[0, 0] != first else 1.0))

    model, step = net(late)
    first = model.blocks[2].up.weight[0, 0].item()
    assert lowtide.verify(model, step, steps=1).equal
    found = lowtide.verify(model, step, steps=2)
    assert not found.equal
    assert found.worst.step == 2


def test_a_fault_of_a_step_between_the_first_and_the_last_is_found(net):
    """One that leaves no trace: no optimizer carries it on."""
    steps = []

    def second(_, h):
        return torch.sin(h * (2.0 if lowtide.is_replaying() and len(steps) == 2 else 1.0))

    model, _ = net(second)

    def step():
        steps.append(1)
        model(torch.ones(6, 8)).square().mean().backward()
        model.zero_grad()

    assert lowtide.verify(model, step, steps=1).equal
    found = lowtide.verify(model, step, steps=3)
    assert found.worst.step == 2
    assert all("gradient of " in name for name in found.different)


@dataclass
class Result:
    """What some models return."""

    loss: torch.Tensor
    scores: torch.Tensor
    note: float = 0.0


@pytest.mark.parametrize("place", ["the model's tensor", "the step's tensor", "the step's number"])
def test_what_is_returned_in_a_dataclass_is_compared(net, place):
    """It differs in nothing else."""
    model, _ = net()
    inner = model.forward

    def forward(x):
        y = inner(x)
        return Result(y.square().mean(), y.argmax(1) + (place == "the model's tensor" and checkpointed()))

    def checkpointed():
        return "forward" in model.blocks[0].__dict__

    def step():
        found = model(torch.ones(6, 8))
        found.loss.backward()
        model.zero_grad()
        more = [place == kind and checkpointed() for kind in ("the step's tensor", "the step's number")]
        return Result(found.loss.detach(), found.scores + more[0] if more[0] else found.scores, float(more[1]))

    model.forward = forward
    found = lowtide.verify(model, step, policy="full", steps=1)
    assert found.different == (("output 1", "result 1") if place == "the model's tensor" else (f"result {1 + ('number' in place)}",))


DATA = {
    "generator": lambda: (torch.randn(6, 8) for _ in itertools.count()),
    "loader": lambda: iter(DataLoader(torch.arange(480.0).view(60, 8), batch_size=6, shuffle=True)),
    "list": lambda: iter([torch.full((6, 8), float(i)) for i in range(10)]),
}


class Holder:
    """An object of a user's, with an iterator in it."""


HOLDER = Holder()
BATCHES = iter(())


@pytest.mark.parametrize("where", ["variable", "attribute", "global"])
@pytest.mark.parametrize("kind", DATA)
def test_every_run_draws_the_same_data(net, kind, where, monkeypatch):
    """A fault is not taken for what other data does; and no item is lost to the step that trains on."""
    model, _ = net(lambda block, h: F.dropout(h, 0.5) * (1.0 if not (block.fails and lowtide.is_replaying()) else 1.5))
    torch.manual_seed(0)
    expected = [next(data) for data in [DATA[kind]()] for _ in range(4)]
    torch.manual_seed(0)
    data = HOLDER.data = DATA[kind]()
    monkeypatch.setitem(globals(), "BATCHES", data)
    draw = {"variable": lambda: next(data), "attribute": lambda: next(HOLDER.data), "global": lambda: next(BATCHES)}[where]

    def step():
        batch = draw()
        model(batch).square().mean().backward()
        model.zero_grad()
        batch.zero_()

    for fails in (False, True):
        model.blocks[2].fails = fails
        found = lowtide.verify(model, step, steps=2)
        assert found.repeatable
        assert found.equal is not fails
    torch.manual_seed(0)
    after = [draw() for _ in range(4)]
    assert all(map(torch.equal, after, expected)) or kind == "generator"


def test_a_step_that_runs_out_of_data_says_so(net):
    model, _ = net()
    data = iter([torch.ones(6, 8)])

    def step():
        model(next(data)).sum().backward()

    with pytest.raises(lowtide.StepError, match="ended in step 2 of a run"):
        lowtide.verify(model, step, steps=2)


@pytest.mark.parametrize("tool", [lowtide.verify, lowtide.audit, lowtide.doctor])
def test_a_model_without_values_has_no_state_to_start_from(tool):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(lowtide.InvalidInputError, match=r"'0\.weight' has no values yet"):
        tool(model, lambda: model(torch.ones(2, 2)).sum().backward())


def test_autocast_of_the_step_itself_is_switched_off_for_fp32(net):
    model, _ = net()
    x = torch.randn(6, 8)

    def step():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss.detach()

    found = lowtide.verify(model, step, three_way=True, steps=1)
    assert found.equal
    assert found.precision.plain > 1e-4


def test_a_step_without_regions_is_no_proof():
    model = nn.Linear(2, 2)

    def step():
        nn.functional.linear(torch.randn(1, 2), model.weight, model.bias).sum().backward()

    with pytest.raises(lowtide.StepError, match="nothing was verified"):
        lowtide.verify(model, step)


@pytest.mark.parametrize(("options", "says"), [({"steps": 0}, "above zero"), ({"plan": object(), "policy": "full"}, "both a plan")])
def test_what_cannot_be_is_refused(net, options, says):
    with pytest.raises(lowtide.InvalidInputError, match=says):
        lowtide.verify(*net(), **options)


def test_an_error_of_the_plain_step_is_the_users(net):
    model, _ = net()

    def step():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        lowtide.verify(model, step)


def test_a_step_without_backward_is_no_proof():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)))
    x = torch.ones(1, 2)
    with pytest.raises(lowtide.StepError, match="no region was replayed"):
        lowtide.verify(model, lambda: model(x).sum(), policy="full")
