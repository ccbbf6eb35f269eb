"""Compiled code inside regions that have a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import lowtide
from lowtide.errors import PolicyError
from lowtide.records import CallSite, Decision

from ._models import Transformer, kept_bytes, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute", "ignore:Using `torch.compile.module")
STATE = torch.get_rng_state().nbytes
"""Bytes that PyTorch keeps in a graph for each attention on the CPU that runs again."""


def compiled_by_itself(block: nn.Module, backend: Any) -> nn.Module:
    block.compile(backend=backend)
    return block


COMPILED: dict[str, Callable[[nn.Module, Any], Callable[..., Any]]] = {
    "module": lambda block, backend: torch.compile(block, backend=backend),
    "method": lambda block, backend: torch.compile(block.forward, backend=backend),
    "by itself": compiled_by_itself,
}


@pytest.mark.parametrize("compiled", COMPILED.values(), ids=list(COMPILED))
@pytest.mark.parametrize("policy", ["selective", "save_only_these_names:up"])
def test_a_policy_over_compiled_blocks_decides_in_their_graphs(compiled, policy):
    plain, model, in_python = (stack(Transformer, 2) for _ in "123")
    backend = CompileCounterWithBackend("aot_eager")
    regions = [lowtide.checkpoint(compiled(block, backend), policy=policy) for block in model]

    def run(x: torch.Tensor) -> torch.Tensor:
        return regions[1](regions[0](x))

    rows = 8, 8, 8
    for found, expected in zip(steps(run, model, rows), steps(plain, plain, rows), strict=True):
        assert torch.equal(found, expected)
    lowtide.apply(in_python, policy)
    steps(in_python, in_python, rows)
    assert kept_bytes(run) - kept_bytes(in_python) in (0, 2 * STATE)
    assert 1 <= backend.frame_count <= 2  # none of them in pieces
    with torch.no_grad():
        assert torch.equal(run(torch.ones(8, 16)), plain(torch.ones(8, 16)))


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_policy_on_a_model_whose_blocks_are_compiled_modules(compiled_first):
    plain, model, in_python = (stack(Transformer, 3) for _ in "123")
    policy = "selective"
    lowtide.apply(in_python, policy)
    handle = None if compiled_first else lowtide.apply(model, policy)
    for index in range(3):
        model[index] = torch.compile(model[index], backend="aot_eager")
    handle = handle or lowtide.apply(model, policy)
    rows = 8, 8
    for found, expected in zip(steps(model, model, rows), steps(plain, plain, rows), strict=True):
        assert torch.equal(found, expected)
    steps(in_python, in_python, rows)
    assert kept_bytes(model) == kept_bytes(in_python) < kept_bytes(plain)
    handle.remove()
    assert kept_bytes(model) == kept_bytes(plain)


def keep_linears(site: CallSite) -> Decision:
    return Decision.KEEP if site.function is F.linear else Decision.RECOMPUTE


class Mixed(nn.Module):
    """A part of what it does may be compiled; that calls ``F.linear`` too, before and after what is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.down = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16)
        self.part = self.inner

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.middle(torch.sin(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.part(self.up(x).exp())).exp()


def test_calls_beside_compiled_code_are_kept_and_that_stays_in_one_piece():
    plain, model, backend = Mixed(), Mixed(), CompileCounterWithBackend("aot_eager")
    model.part = torch.compile(model.inner, backend=backend, fullgraph=True)
    region = lowtide.checkpoint(model, policy=keep_linears)
    with pytest.warns(UserWarning, match=r"cannot see what torch.compile compiles inside it \(Mixed"):
        found = steps(region, model, (8,))
    found += steps(region, model, (8, 8, 8))
    for one, other in zip(found, steps(plain, plain, (8,)) + steps(plain, plain, (8, 8, 8)), strict=True):
        assert torch.equal(one, other)
    assert backend.frame_count == 1
    whole = lowtide.checkpoint(plain)
    steps(whole, plain, (8, 8))
    kept_in_view = 8 * (64 + 16) * 4
    assert kept_bytes(region) == kept_bytes(whole) + kept_in_view


def test_a_rule_that_could_only_match_in_compiled_code_is_an_error_that_says_so():
    model = Mixed()
    model.part = torch.compile(model.inner, backend="aot_eager")
    region = lowtide.checkpoint(model, policy=lowtide.policy.keep(lowtide.policy.op("aten.sin")))
    with (
        pytest.warns(UserWarning, match="cannot see"),
        pytest.raises(PolicyError, match=r"matched nothing.*cannot see what torch.compile compiles inside a region \(Mixed"),
    ):
        steps(region, model)
