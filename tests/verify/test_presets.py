"""Every bundled workload under every preset that has something to decide there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lowtide
from lowtide.workloads import bundled

WORKLOADS = {
    "gpt": {"blocks": 3, "width": 32, "heads": 2, "context": 32, "batch": 2, "corpus_bytes": 2**16},
    "resnet": {"widths": (8, 16), "depths": (2, 2), "batch": 4, "dataset": 40},
    "unet": {"widths": (8, 16, 24), "batch": 4, "dataset": 40},
}
ANYWHERE = [
    "full",
    "every:2",
    "skip_last:1",
    "sqrt",
    "selective",
    "megatron_uniform:2",
    "megatron_block:1",
    "megatron:--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
]
WITH_PRODUCTS = ["torchtitan", "megatron_selective", "dots_with_no_batch_dims_saveable"]
"""Rules about matrix products and attention, of which convolutional networks have none; elsewhere they are errors that say so."""


@pytest.mark.parametrize("policy", ANYWHERE)
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_preset_changes_nothing(name, policy):
    workload = bundled(name, **WORKLOADS[name])
    assert lowtide.verify(workload.model, workload.step, policy=policy).equal


@pytest.mark.parametrize("policy", WITH_PRODUCTS)
def test_a_preset_for_transformers(policy):
    workload = bundled("gpt", **WORKLOADS["gpt"])
    assert lowtide.verify(workload.model, workload.step, policy=policy).equal


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_policy_and_a_plan_from_a_trace(name):
    torch.manual_seed(0)
    workload = bundled(name, **WORKLOADS[name])
    traced = lowtide.trace(workload.model, workload.step)
    # What is cheap must not depend on the machine: every op takes the same time, next to which the engine's own is nothing.
    trace = replace(traced, ops=tuple(replace(op, seconds=1e-2) for op in traced.ops))
    assert lowtide.verify(workload.model, workload.step, policy=lowtide.policy.cheap(trace)).equal
    plan = lowtide.solve(trace, int(0.95 * lowtide.simulate(trace, ()).peak_bytes))
    assert lowtide.verify(workload.model, workload.step, plan=plan).equal
