"""Regions of plans that have calls of functions among their members."""

from __future__ import annotations

import torch

import lowtide
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.report._regions import decided
from lowtide.workloads.unet import UNet

CAT = ":torch._VariableFunctionsClass.cat[0]"


def test_a_function_counts_in_the_region_that_it_is_a_member_of() -> None:
    model, x = UNet(widths=(8, 16)), torch.randn(2, 3, 16, 16)
    trace = lowtide.trace(model, lambda: model(x).square().sum().backward())
    freed = {}
    for paths in [("up.0",), (CAT, "up.0")]:
        plan = Plan((PlannedRegion(paths),), trace.fingerprint, 0, 0, 0.0, 0.0, "by hand")
        rows = decided(trace, plan, simulate(trace, plan))
        freed[paths] = next(row.freed_bytes for row in rows if row.paths == paths)
    assert freed[CAT, "up.0"] - freed["up.0",] == 2 * 16 * 16 * 16 * 4  # what the concatenation makes
