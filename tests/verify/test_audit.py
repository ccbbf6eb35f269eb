"""The audit sees each kind of thing that a region does, says whether it is handled, and is silent of a region that only computes."""

from __future__ import annotations

import contextvars
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.verify.audit import Kind

LOG: list[int] = []
COUNT = 0
SCALE = contextvars.ContextVar("scale", default=2.0)


def drops(_, h):
    return F.dropout(h, 0.5) * random.random()


def counts(block, h):
    block.count.add_(1)
    return h * block.count


def remembers(block, h):
    block.last = float(h.detach().sum())
    return h


def keeps(block, h):
    block.last = [*getattr(block, "last", ()), 1]
    return h


def appends(_, h):
    LOG.append(1)
    return h


def rebinds(_, h):
    global COUNT
    COUNT += 1
    return h


def asks_context(_, h):
    return h * SCALE.get()


def asks_clock(_, h):
    return h * (1 + 0 * time.perf_counter())


def moves(_, h):
    return h + 0 * h.detach().sum().to("meta").shape.numel()


def moves_back(_, h):
    return h + torch.zeros_like(torch.zeros(1, device="meta"), device="cpu")


def puts(_, h):
    return h + torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0])).sum()


def branches(_, h):
    return torch.sin(h) if h.sum() > 0 else torch.sin(torch.sin(h))


def differs(_, h):
    return torch.sin(h * (2.0 if lowtide.is_replaying() else 1.0))


def prints(_, h):
    print("here")
    return h


@pytest.mark.parametrize(
    ("fault", "kind", "what", "handled"),
    [
        (drops, Kind.RANDOM, "the generator of torch", True),
        (drops, Kind.RANDOM, "the generator of Python", True),
        (counts, Kind.BUFFER, "count", True),
        (remembers, Kind.ATTRIBUTE, "last", True),
        (appends, Kind.GLOBAL, "LOG", False),
        (rebinds, Kind.GLOBAL, "COUNT", False),
        (asks_context, Kind.AMBIENT, "context variable scale", True),
        (asks_clock, Kind.SIDE_EFFECT, "the clock is read at test_audit.py:", False),
        (moves, Kind.DEVICE, "moves to meta, which has no guard", False),
        (moves_back, Kind.DEVICE, "aten.zeros_like.default moves to cpu", True),
        (puts, Kind.NONDETERMINISTIC, "aten.put_.default", False),
        (branches, Kind.CONTROL_FLOW, "values are read by aten.", True),
        (branches, Kind.CONTROL_FLOW, "8 calls went 2 ways", True),
        (differs, Kind.REPLAY, "aten.sin.default", False),
        (prints, Kind.SIDE_EFFECT, "writes output", False),
    ],
)
def test_what_a_region_does_is_seen(net, fault, kind, what, handled):
    report = lowtide.audit(*net(fault), batches=8 if fault is branches else 2)
    found = [(region.region, o) for region in report.regions for o in region.observations if o.kind is kind and what in o.what]
    assert [(region, o.handled) for region, o in found] == [("blocks.2", handled)], report.report()
    assert all(o.how for _, o in found)
    assert bool(report.risks) is not handled
    others = [region for region in report.regions if region.region != "blocks.2"]
    assert [region.observations for region in others] == [()] * 4


def test_an_input_that_is_written_to(net):
    model, _ = net()

    def doubled(x):
        return torch.sin(x.mul_(2.0))

    def step():
        lowtide.checkpoint(doubled)(model(torch.randn(6, 8)) * 1).sum().backward()

    report = lowtide.audit(model, step)
    assert [(o.kind, o.what, o.handled) for o in report.regions[0].observations] == [(Kind.INPUT, "x", True)]


def test_autocast_around_a_region_is_ambient(net):
    model, _ = net()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(6, 8)).float().sum()
        loss.backward()

    report = lowtide.audit(model, step, policy="full")
    assert {o.what for region in report.regions for o in region.observations} == {"autocast on cpu to bfloat16"}


def test_calls_of_torch_checkpoint_are_audited(net):
    report = lowtide.audit(*net(counts, call=lambda block, x: checkpoint(block, x, use_reentrant=False)), batches=1)
    assert [region.region for region in report.regions] == ["Block"]
    assert report.regions[0].calls == 4
    assert [o.kind for o in report.regions[0].observations] == [Kind.BUFFER]


def test_nothing_is_left_behind(net):
    model, step = net(counts)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lowtide.audit(model, step)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not torch.are_deterministic_algorithms_enabled()
    assert "forward" not in model.blocks[0].__dict__


def test_copies_that_the_engine_makes_are_no_ways_of_the_region(net):
    [region] = [region for region in lowtide.audit(*net(counts), batches=3).regions if region.region == "blocks.2"]
    assert (region.calls, region.ways) == (3, 1)


def test_warnings_of_the_users_come_through(net):
    import warnings

    def warns(_, h):
        warnings.warn("mine", UserWarning, stacklevel=1)
        return h

    with pytest.warns(UserWarning, match="mine"):
        lowtide.audit(*net(warns), policy="full", batches=1)  # only the watched step runs


def test_a_step_without_regions_is_no_audit():
    model = nn.Linear(2, 2)

    def step():
        F.linear(torch.randn(1, 2), model.weight, model.bias).sum().backward()

    with pytest.raises(lowtide.StepError, match="nothing was audited"):
        lowtide.audit(model, step)
    with pytest.raises(lowtide.InvalidInputError, match="one batch"):
        lowtide.audit(model, step, batches=0)


def test_records_of_lowtide_that_a_policy_makes_are_no_code_of_the_users(net):
    """One of them has a field called ``random``."""
    report = lowtide.audit(*net(), policy=lambda site: lowtide.Decision.RECOMPUTE, batches=1)
    assert all(region.observations == () for region in report.regions), report.report()


@pytest.mark.parametrize("fault", [remembers, keeps])
def test_attributes_that_torchs_checkpoint_does_not_put_back_are_a_risk(net, fault):
    report = lowtide.audit(*net(fault, call=lambda block, x: checkpoint(block, x, use_reentrant=False)), batches=1)
    [(region, risk)] = report.risks
    assert (region, risk.kind) == ("Block", Kind.SIDE_EFFECT)
    assert risk.what.startswith("last is changed")


def test_a_collective_is_a_risk(net, tmp_path):
    def reduces(_, h):
        torch.distributed.all_reduce(h.detach().clone())
        return h

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        report = lowtide.audit(*net(reduces))
    finally:
        torch.distributed.destroy_process_group()
    assert [(region, risk.kind) for region, risk in report.risks] == [("blocks.2", Kind.COLLECTIVE)]
    assert "c10d.allreduce_" in report.risks[0][1].what
