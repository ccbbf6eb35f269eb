"""Calls that are kept where no gradients are recorded, and hooks around the region: whether they are recorded is the user's business."""

from __future__ import annotations

import contextlib

import pytest
import torch

from lowtide.engine import checkpoint

from .conftest import Choose, everything


def _partly_without(x):
    with torch.no_grad():
        scale = torch.exp(-x * x)
        scale = torch.sin(scale)
    assert not scale.requires_grad
    return torch.tanh(x) * scale


def _inside(region):
    inner = region(_partly_without)
    outer = checkpoint(lambda x: torch.sin(inner(x)))
    return outer if region is not _plain else lambda x: torch.sin(inner(x))


def _plain(fn):
    return fn


def _keeping(fn):
    return checkpoint(fn, policy=Choose(everything))


@pytest.mark.parametrize(
    ("build", "around"),
    [
        (lambda region: region(_partly_without), torch.autograd.graph.save_on_cpu),
        (lambda region: region(_partly_without), contextlib.nullcontext),
        (_inside, contextlib.nullcontext),
        (_inside, torch.autograd.graph.save_on_cpu),
    ],
)
def test_a_kept_call_leaves_it_to_the_user_whether_gradients_are_recorded(build, around):
    seen = []
    for region in (_plain, _keeping):
        torch.manual_seed(0)
        run, found = build(region), []
        for _ in range(6):
            x = torch.randn(4, 8, requires_grad=True)
            with around():
                out = run(x * 1)
            out.square().sum().backward()
            found.append(x.grad)
        seen.append(found)
    assert all(map(torch.equal, *seen))


def test_sparse_tensors_in_a_region_with_a_policy():
    matrix = torch.eye(4) * 2

    def fn(x):
        return torch.tanh(matrix.to_sparse() @ torch.sin(x))

    run = checkpoint(fn, policy=Choose(lambda site: site.index == 0))
    for _ in range(5):
        grads = []
        for call in (fn, run):
            x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
            call(x * 1).square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
