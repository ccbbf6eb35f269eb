"""Modules whose weights are computed, or only made when they are first called."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


@pytest.mark.parametrize("backward_inside", [True, False])
def test_parametrized_weights_that_are_computed_once_for_several_calls(compare, backward_inside):
    def scenario(region):
        model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh())
        run, seen = region(model), []
        for _ in range(4):
            x = torch.randn(3, 4, requires_grad=True)
            with parametrize.cached():
                loss = (run(x) + run(x.sin())).sum()
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            seen.append([x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert parametrize._cache_enabled == 0
        assert parametrize._cache == {}
        return seen

    compare(scenario)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_normalised_weights(compare, train, norm):
    def scenario(region):
        model = nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 4)))
        return train(region(model), model)

    compare(scenario)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("as_function", [True, False])
def test_modules_that_get_their_shapes_in_the_first_call(compare, train, as_function):
    def scenario(region):
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyBatchNorm1d(), nn.Tanh())
        run = region((lambda x: model(x) * 1) if as_function else model)
        run(torch.randn(5, 4, requires_grad=True)).sum().backward()
        model.zero_grad()
        return train(run, model)

    compare(scenario)
