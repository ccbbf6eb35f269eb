"""Regions that keep results, called now on their own and now inside another region or under hooks: calls save other tensors there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide


def _gradients(chain, wrap) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    inner, outer = nn.Linear(8, 8), nn.Linear(8, 8)
    f = wrap(lambda x: torch.tanh(inner(x)), policy="selective")
    found = []
    for _ in range(3):
        x = torch.randn(4, 8)
        inner.zero_grad(), outer.zero_grad()
        chain(f, wrap, outer, x).sum().backward()
        found.append([p.grad.clone() for p in (*inner.parameters(), *outer.parameters()) if p.grad is not None])
    return found


def _in_region(policy):
    def chain(f, wrap, outer, x):
        return wrap(lambda x: torch.tanh(outer(f(x))), **({} if policy is None else {"policy": policy}))(f(x))

    return chain


def _twice_in_region(f, wrap, outer, x):
    return wrap(lambda x: torch.tanh(outer(f(f(x)))))(x)


def _under_hooks(f, wrap, outer, x):
    y = f(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return outer(f(y))


CHAINS = {
    "in a region": _in_region(None),
    "in one that keeps": _in_region("selective"),
    "in one that keeps nothing": _in_region("full"),
    "twice in a region": _twice_in_region,
    "under hooks": _under_hooks,
}


@pytest.mark.parametrize("chain", CHAINS.values(), ids=list(CHAINS))
def test_gradients_are_those_without_regions(chain):
    plain = _gradients(chain, lambda fn, **_: fn)
    for found, expected in zip(_gradients(chain, lowtide.checkpoint), plain, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
