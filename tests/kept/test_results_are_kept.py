"""What is kept is not run again, whoever asks for it, and however; gradients are those of the plain run to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.engine import checkpoint

from .conftest import Choose, assert_same, costly, costly_calls, everything, function, module, snapshot


def _chain(x):
    return torch.exp(torch.tanh(costly(torch.cos(x))) * 0.1)


def _step(fn, leaves=None):
    x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_() if leaves is None else leaves
    fn(x * 1).square().sum().backward()
    return x.grad


def test_a_kept_call_does_not_run_in_the_replay(runs):
    expected = _step(_chain)
    run, counts = checkpoint(_chain, policy=Choose(costly_calls)), []
    for _ in range(4):
        before = runs[0]
        assert_same(_step(run), expected)
        counts.append(runs[0] - before)
    assert counts == [2, 1, 1, 1]


def test_without_a_policy_it_does(runs):
    run, counts = checkpoint(_chain), []
    for _ in range(3):
        before = runs[0]
        _step(run)
        counts.append(runs[0] - before)
    assert counts == [2, 2, 2]


def test_only_the_chosen_one_of_several_calls(runs):
    def fn(x):
        for _ in range(4):
            x = torch.tanh(costly(torch.cos(x)))
        return torch.exp(x * 0.1)

    expected = _step(fn)
    run = checkpoint(fn, policy=Choose(lambda site: costly_calls(site) and site.index in (1, 2)))
    for _ in range(2):
        before = runs[0]
        assert_same(_step(run), expected)
    assert runs[0] - before == 4 + 2


def test_a_module_is_not_run_again(compare):
    ran = []

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            ran.append(1)
            return self.two(torch.sin(self.one(x)))

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = Inner(), nn.Linear(4, 4)

        def forward(self, x):
            return torch.sin(self.last(torch.tanh(self.inner(torch.cos(x)))))

    def scenario(region):
        outer = Outer()
        run = region(outer)

        def step():
            ran.clear()
            outer.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            run(x * 1).square().sum().backward()
            return [x.grad, *(p.grad for p in outer.parameters())]

        return step

    compare(scenario, module(Inner))
    assert len(ran) == 1


@pytest.mark.parametrize("rule", [everything, function("linear"), function("scaled_dot_product_attention", "gelu"), module(nn.Linear)])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_transformer_block(compare, rule, autocast):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.qkv, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            q, k, v = self.qkv(self.norm(x)).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)
            return x + self.down(F.gelu(self.up(x)))

    def scenario(region):
        block = Block()
        run = region(block)

        def step():
            block.zero_grad()
            x = torch.randn(2, 5, 8, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = run(x * 1)
            y.float().square().sum().backward()
            return [y, x.grad, *(p.grad for p in block.parameters())]

        return step

    compare(scenario, rule)


def test_functions_with_several_results_and_with_none_that_is_a_tensor(compare):
    def fn(x):
        values, indices = torch.topk(torch.sin(x), 2, dim=1)
        var, mean = torch.var_mean(torch.cos(x), dim=1, keepdim=True)
        scale = torch.sigmoid(x).max().item()
        return torch.tanh(values * scale + var * mean).gather(1, indices % 2)

    def scenario(region):
        run = region(fn)

        def step():
            x = torch.randn(3, 4, requires_grad=True)
            run(x * 1).square().sum().backward()
            return x.grad

        return step

    compare(scenario, everything)


@pytest.mark.parametrize("rule", [costly_calls, everything])
class TestBackwards:
    """Ways to go backward."""

    def test_twice(self, runs, rule):
        x = torch.randn(3, 4, requires_grad=True)
        expected = torch.autograd.grad(_chain(x * 1).sum(), x)
        run = checkpoint(_chain, policy=Choose(rule))
        for _ in range(3):
            y = run(x * 1).sum()
            first = torch.autograd.grad(y, x, retain_graph=True)
            second = torch.autograd.grad(y, x, retain_graph=True)
            third = torch.autograd.grad(y, x)
            assert_same([*first, *second, *third], snapshot([*expected * 3]))

    def test_of_gradients(self, rule):
        def fn(x):
            return torch.exp(torch.tanh(torch.sin(torch.cos(x))) * 0.1)

        def penalty(call):
            x = torch.linspace(-1, 1, 12).requires_grad_()
            first = torch.autograd.grad(call(x * 1).square().sum(), x, create_graph=True)[0]
            (first.square().sum() + call(x * 1).sum()).backward()
            return [snapshot(first), x.grad]

        if rule is costly_calls:
            rule = function("sin")
        expected = penalty(fn)
        run = checkpoint(fn, policy=Choose(rule))
        for _ in range(3):
            assert_same(penalty(run), expected)

    def test_of_parts(self, rule):
        def fn(x, y):
            a = torch.tanh(costly(torch.cos(x)))
            return a * torch.exp(torch.sin(y)), torch.tanh(a)

        def parts(call):
            x, y = (torch.linspace(-1, 1, 12).add(i).requires_grad_() for i in range(2))
            one, two = call(x * 1, y * 1)
            found = [torch.autograd.grad(one.sum(), y, retain_graph=True)[0], torch.autograd.grad(two.sum(), x, retain_graph=True)[0]]
            return [*found, *torch.autograd.grad(one.sum() + two.sum(), (x, y))]

        expected = parts(fn)
        run = checkpoint(fn, policy=Choose(rule))
        for _ in range(3):
            assert_same(parts(run), expected)

    def test_inside_the_region_itself(self, rule):
        def fn(x):
            with torch.enable_grad():
                inner = torch.tanh(costly(torch.cos(x)))
                slope = torch.autograd.grad(inner.sum(), x, create_graph=True)[0]
            return torch.sin(inner) * slope

        expected = _step(fn)
        run = checkpoint(fn, policy=Choose(rule))
        for _ in range(3):
            assert_same(_step(run), expected)
