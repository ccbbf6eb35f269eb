"""A plan that keeps calls inside its regions: carried out as planned, to the byte, and with the gradients of the plain step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.measure import peak_bytes
from lowtide.plan import KeptCall, PlannedRegion
from lowtide.trace import trace
from lowtide.workloads.gpt import GPT

LINEAR = "torch._C._nn.linear"
ATTENTION = "torch._C._nn.scaled_dot_product_attention"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def workload():
    torch.manual_seed(0)
    model = GPT(blocks=2, width=32, heads=2, context=64, dropout=0.0)
    x, y = torch.randint(256, (2, 4, 64)).unbind()

    def step():
        model.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss.detach()

    step()
    return model, step, trace(model, step)


def in_block(block: str) -> dict[str, KeptCall]:
    return {
        "qkv": KeptCall(f"{block}.attention.qkv", LINEAR, 0),
        "attention": KeptCall(f"{block}.attention", ATTENTION, 0),
        "out": KeptCall(f"{block}.attention.out", LINEAR, 1),
        "up": KeptCall(f"{block}.mlp.0", LINEAR, 2),
    }


def in_segment(block: str) -> dict[str, KeptCall]:
    return {name: call for name, call in in_block(block).items() if name != "up"}


def planned(traced, *regions: PlannedRegion) -> lowtide.Plan:
    after = lowtide.simulate(traced, regions)
    return lowtide.Plan(regions, traced.fingerprint, after.peak_bytes, after.peak_bytes, after.planned_s, after.added_s, "by hand")


def check(workload, *regions: PlannedRegion) -> None:
    model, step, traced = workload
    plan = planned(traced, *regions)
    expected = step(), [p.grad.clone() for p in model.parameters()]
    handle = lowtide.apply(model, plan)
    try:
        for _ in range(3):  # the first step watches, the others keep
            loss = step()
            assert torch.equal(loss, expected[0])
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected[1], strict=True))
        resident = sum(s.bytes for s in traced.storages if s.resident)
        assert abs(peak_bytes(step, CPU, resident) - plan.predicted_peak_bytes) <= 256
    finally:
        handle.remove()


@pytest.mark.parametrize("names", [(), ("attention",), ("qkv",), ("out",), ("up",), ("attention", "up"), ("qkv", "attention", "out", "up")])
def test_blocks_that_keep_calls(workload, names) -> None:
    blocks = ("blocks.0", "blocks.1")
    check(workload, *(PlannedRegion((b,), kept=tuple(in_block(b)[name] for name in names)) for b in blocks))


@pytest.mark.parametrize("names", [("attention",), ("qkv", "attention")])
def test_segments_that_keep_calls(workload, names) -> None:
    blocks = ("blocks.0", "blocks.1")
    regions = [PlannedRegion((f"{b}.attention_norm", f"{b}.attention"), kept=tuple(in_segment(b)[name] for name in names)) for b in blocks]
    check(workload, *regions, *(PlannedRegion((f"{b}.mlp.1", f"{b}.mlp.2")) for b in blocks))


def test_a_norm_and_the_linear_inside_the_next_module_are_a_region(workload) -> None:
    check(workload, *(PlannedRegion((f"blocks.{i}.attention_norm", f"blocks.{i}.attention.qkv")) for i in range(2)))


def test_a_kept_call_that_the_step_does_not_make_is_refused(workload) -> None:
    model, step, traced = workload
    region = PlannedRegion(("blocks.0",), kept=(KeptCall("blocks.0.mlp.0", LINEAR, 7),))
    with pytest.raises(lowtide.PlanError, match=r"call 7 of torch\._C\._nn\.linear in 'blocks\.0\.mlp\.0'"):
        lowtide.simulate(traced, [region])
    plan = lowtide.Plan((region,), traced.fingerprint, 1, 1, 0.0, 0.0, "by hand")
    handle = lowtide.apply(model, plan)
    try:
        with pytest.raises(lowtide.PolicyError, match=r"linear\[7\] in blocks\.0\.mlp\.0"):
            step()
    finally:
        handle.remove()
