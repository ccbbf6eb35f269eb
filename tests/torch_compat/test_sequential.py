"""``checkpoint_sequential`` splits into equal counts and leaves the last segment alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide.torch_compat


class _Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.sin(torch.exp(x * 0.1))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize(("segments", "replayed"), [(1, 0), (2, 5), (3, 6), (5, 8)])
def test_every_segment_but_the_last_is_replayed(api, use_reentrant, segments, replayed):
    layers = [_Counted() for _ in range(10)]
    x = torch.randn(3, requires_grad=True)
    out = api.checkpoint_sequential(layers, segments, x, use_reentrant=use_reentrant)
    assert [layer.calls for layer in layers] == [1] * 10
    out.sum().backward()
    assert [layer.calls for layer in layers] == [2] * replayed + [1] * (10 - replayed)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_equal_the_plain_ones(api, use_reentrant):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    state = torch.get_rng_state()
    model(x).sum().backward()
    expected = [t.grad.clone() for t in (x, *model.parameters())]
    x.grad = None
    model.zero_grad()
    torch.set_rng_state(state)
    api.checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip((x, *model.parameters()), expected, strict=True))


def test_unknown_keywords_are_refused(api):
    with pytest.raises(ValueError, match="Unexpected keyword arguments: a"):
        api.checkpoint_sequential([nn.Linear(1, 1)], 1, torch.ones(1, 1), use_reentrant=False, a=1)


def test_not_saying_which_form_is_warned_about(api):
    with pytest.warns(UserWarning, match="use_reentrant parameter should be passed explicitly"):
        api.checkpoint_sequential([nn.Linear(1, 1), nn.Linear(1, 1)], 2, torch.ones(1, 1, requires_grad=True))


def test_a_module_used_twice_runs_twice():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    assert torch.equal(lowtide.torch_compat.checkpoint_sequential(model, 2, x, use_reentrant=False), model(x))
