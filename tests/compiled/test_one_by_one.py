"""Blocks that are compiled one by one: each keeps what its own policy says, and those that keep the same share a graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
from lowtide.plan import KeptCall, Plan, PlannedRegion
from lowtide.policy._fingerprint import fingerprint
from lowtide.records import CallSite, Decision

from ._models import Block, kept_bytes, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")


def planned(*kept: str) -> Callable[[nn.Module], object]:
    def install(model: nn.Module) -> object:
        calls = [
            tuple(KeptCall(path, "torch._C._nn.linear", path.endswith("down")) for path in kept if path[0] == str(i)) for i in range(4)
        ]
        regions = tuple(PlannedRegion((str(i),), kept=calls[i]) for i in range(4))
        return lowtide.apply(model, Plan(regions, fingerprint(model), 0, 0, 0.0, 0.0, "by hand"))

    return install


def by_path(site: CallSite) -> Decision:
    return Decision.KEEP if site.module in ("1.up", "2.up", "3.down") and site.level == "function" else Decision.RECOMPUTE


CHOSEN = {
    "full": (lambda model: lowtide.apply(model, "full"), 1),
    "selective": (lambda model: lowtide.apply(model, "selective"), 1),
    "by path": (lambda model: lowtide.apply(model, by_path), 3),
    "a plan that keeps the same in each": (planned("0.up", "1.up", "2.up", "3.up"), 1),
    "a plan that keeps something else in each": (planned("0.up", "1.down", "3.up", "3.down"), 4),
}


@pytest.mark.parametrize(("install", "graphs"), CHOSEN.values(), ids=list(CHOSEN))
def test_each_keeps_its_own(install, graphs):
    plain, model = stack(Block, 4), stack(Block, 4)
    install(model)
    backend = CompileCounterWithBackend("aot_eager")
    for block in model:
        block.compile(backend=backend, fullgraph=True)
    rows = 8, 8
    for found, expected in zip(steps(model, model, rows), steps(plain, plain, rows), strict=True):
        assert torch.equal(found, expected)
    in_python = stack(Block, 4)
    install(in_python)
    steps(in_python, in_python, rows)
    assert kept_bytes(model) == kept_bytes(in_python)
    assert backend.frame_count == graphs


def test_a_rule_that_matches_in_no_block_is_an_error():
    model = stack(Block, 4)
    lowtide.apply(model, lowtide.policy.keep(lowtide.policy.op("aten.convolution")))
    for block in model:
        block.compile(backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"convolution.*matched nothing"):
        steps(model, model)
