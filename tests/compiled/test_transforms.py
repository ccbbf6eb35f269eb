"""Function transforms of ``torch.func`` around regions in what is compiled, and inside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vmap

import lowtide
from lowtide.records import CallSite, Decision

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.skipif(torch.__version__.startswith(("2.11", "2.12")), reason="an error of compiling there"),
]
AROUND: dict[str, Callable[[Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "grad": lambda fn: grad(lambda y: fn(y).sum()),
    "vmap(grad)": lambda fn: vmap(grad(lambda y: fn(y).sum())),
    "jacrev": jacrev,
}


def keep_exp(site: CallSite) -> Decision:
    return Decision.KEEP if site.function is torch.exp else Decision.RECOMPUTE


@pytest.mark.parametrize("options", [{}, {"policy": keep_exp}], ids=["full", "keeps some"])
@pytest.mark.parametrize("around", AROUND.values(), ids=list(AROUND))
def test_a_transform_around_a_region(around, options):
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)

    def body(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x @ weight) * torch.exp(x)

    region = lowtide.checkpoint(body, **options)
    compiled = torch.compile(around(region), backend="aot_eager", fullgraph=True)
    with pytest.warns(UserWarning, match="runs under a function transform"):
        found = compiled(x)
    for result in (found, compiled(x)):
        expected = around(body)(x)
        assert torch.equal(result, expected)
        assert torch.equal(torch.autograd.grad(result.sum(), weight)[0], torch.autograd.grad(expected.sum(), weight)[0])
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_a_transform_inside_a_region():
    weight = torch.randn(4, 4, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        return vmap(grad(lambda row: torch.sin(row @ weight).sum()))(x) * torch.sin(x @ weight)

    region = lowtide.checkpoint(body)
    compiled = torch.compile(lambda x: torch.cos(region(x)), backend="aot_eager")
    for turn in range(3):
        x = torch.randn(3, 4, requires_grad=True)
        expected = torch.autograd.grad(torch.cos(body(x)).sum(), (x, weight))
        if turn == 0:
            with pytest.warns(UserWarning, match=r"could not take region .* \(it contains transforms of torch.func\)"):
                result = compiled(x)
        else:
            result = compiled(x)
        found = torch.autograd.grad(result.sum(), (x, weight))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
