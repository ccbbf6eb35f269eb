"""What a region reads: arguments, containers, closures, parameters. A replay sees what the forward saw, or an error names what changed."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import lowtide
from lowtide.errors import InputChangedError, ReplayError


def test_closures_made_in_a_loop_use_the_layer_that_the_forward_used(compare):
    def scenario(region):
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            h = x
            for layer in layers:
                h = region(lambda t: torch.tanh(layer(t)))(h)  # noqa: B023
            h.sum().backward()
            seen.append((x.grad, [p.grad.clone() for p in layers.parameters()]))
        return seen

    compare(scenario)


def test_a_closure_over_a_number_that_changes_before_backward(compare):
    def scenario(region):
        scale = 1.0
        run = region(lambda x: torch.sin(x * scale))
        seen = []
        for step in range(4):
            x = torch.randn(4, requires_grad=True)
            scale = float(step + 1)
            out = run(x)
            scale = -100.0
            out.sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_parameters_swapped_in_by_functional_call(compare):
    def scenario(region):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
                object.__setattr__(self, "run", region(self.block))  # no second name for the block's parameters

            def forward(self, x):
                return torch.sin(self.run(x))

        model = Model()
        seen = []
        for _ in range(3):
            swapped = {name: torch.randn_like(p, requires_grad=True) for name, p in model.named_parameters()}
            out = functional_call(model, swapped, (torch.randn(2, 4),))
            out.square().sum().backward()
            seen.append([p.grad for p in swapped.values()])
        return seen, [p.grad for p in model.parameters()]

    compare(scenario)


def test_a_region_whose_function_calls_functional_call(compare):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        run = region(lambda params, x: torch.sin(functional_call(block, params, (x,))))
        seen = []
        for _ in range(3):
            swapped = {name: torch.randn_like(p, requires_grad=True) for name, p in block.named_parameters()}
            run(swapped, torch.randn(3, 4)).square().sum().backward()
            seen.append([p.grad for p in swapped.values()])
        return seen, dict(block.state_dict())

    compare(scenario)


def _mul(x, *, mask=None, batch=None):
    return torch.sin(x * (mask if mask is not None else batch["mask"]) * 1.5)


@pytest.mark.parametrize("warm_up", [0, 3])
@pytest.mark.parametrize("where", ["mask", "batch", "x"])
def test_an_argument_changed_after_the_forward_is_an_error_that_names_it(warm_up, where):
    run = lowtide.checkpoint(_mul)
    for step in range(warm_up + 1):
        leaf = torch.randn(4, requires_grad=True)
        x, mask = leaf * 1, torch.rand(4)
        out = run(x, mask=mask) if where != "batch" else run(x, batch={"mask": mask})
        if step < warm_up:
            out.sum().backward()
    with torch.no_grad():
        (x if where == "x" else mask).add_(1)
    with pytest.raises(RuntimeError, match=where):
        out.sum().backward()


@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_captured_tensor_changed_after_the_forward_is_an_error_that_names_it(warm_up):
    captured = torch.rand(4)
    run = lowtide.checkpoint(lambda x: torch.sin(x * captured * 1.5))
    for _ in range(warm_up):
        run(torch.randn(4, requires_grad=True)).sum().backward()
    out = run(torch.randn(4, requires_grad=True))
    captured.mul_(2)
    with pytest.raises(RuntimeError, match="captured"):
        out.sum().backward()


@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_weight_changed_before_backward_is_an_error_that_names_it(warm_up):
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    run = lowtide.checkpoint(block)
    for _ in range(warm_up):
        run(torch.randn(2, 4, requires_grad=True)).sum().backward()
    out = run(torch.randn(2, 4, requires_grad=True))
    with torch.no_grad():
        block[2].weight.add_(1)
    with pytest.raises(RuntimeError, match=r"2\.weight"):
        out.sum().backward()


def test_an_optimizer_step_after_backward_is_no_error(compare):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.Adam(block.parameters(), lr=0.1)
        run = region(block)
        seen = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = run(torch.randn(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            seen.append(loss)
        return seen, list(block.parameters())

    compare(scenario)


def test_an_input_that_changed_is_reported_as_such():
    run = lowtide.checkpoint(_mul)
    mask = torch.rand(4)
    out = run(torch.randn(4, requires_grad=True), mask=mask)
    mask.zero_()
    with pytest.raises(InputChangedError):
        out.sum().backward()


def test_a_dict_that_the_region_rewrites(compare):
    def scenario(region):
        layer = nn.Linear(4, 4)

        def fn(batch):
            batch["x"] = torch.tanh(layer(batch["x"]))
            batch["x"] = torch.tanh(layer(batch["x"]))
            batch["extra"] = 1
            return batch

        run = region(fn)
        seen = []
        for _ in range(4):
            x = torch.randn(2, 4, requires_grad=True)
            batch = {"x": x}
            out = run(batch)
            assert out is batch
            out["x"].sum().backward()
            seen.append((x.grad, dict(batch), [p.grad.clone() for p in layer.parameters()]))
        return seen

    compare(scenario)


def test_a_list_that_the_region_pops(compare):
    def scenario(region):
        def fn(args):
            y = args.pop()
            x = args.pop()
            args.append(x)
            return torch.sin(torch.sin(x) * y)

        run = region(fn)
        seen = []
        for _ in range(4):
            given = [torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)]
            both = list(given)
            run(both).sum().backward()
            seen.append(([t.grad for t in given], len(both)))
        return seen

    compare(scenario)


def test_a_nested_container_that_the_region_rewrites(compare):
    def scenario(region):
        def fn(state):
            state["layers"][0].append(state["x"])
            state["x"] = torch.sin(state["x"]) * len(state["layers"][0])
            return torch.sin(state["x"])

        run = region(fn)
        seen = []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            state = {"layers": [[]], "x": x}
            run(state).sum().backward()
            seen.append((x.grad, len(state["layers"][0])))
        return seen

    compare(scenario)


def test_a_consumed_iterator_is_an_error_that_names_it():
    def fn(x, factors):
        for factor in factors:
            x = torch.sin(x * factor)
        return x

    with pytest.raises((ReplayError, lowtide.InvalidInputError), match="factors"):
        lowtide.checkpoint(fn)(torch.randn(3, requires_grad=True), iter([1.0, 2.0, 3.0])).sum().backward()


def test_names_of_options_belong_to_the_users_function(compare, train):
    def scenario(region):
        def fn(x, *, debug, context_fn, use_reentrant, preserve_rng_state, early_stop, determinism_check, fn, options):
            assert (debug, context_fn, use_reentrant, preserve_rng_state) == (3, 4, 5, 6)
            return torch.sin(torch.sin(x) * (debug + context_fn + use_reentrant + early_stop + determinism_check + fn + options))

        run = region(fn)
        names = {"debug": 3, "context_fn": 4, "use_reentrant": 5, "preserve_rng_state": 6}
        more = {"early_stop": 7, "determinism_check": 8, "fn": 9, "options": 10}
        return train(lambda x: run(x, **names, **more))

    compare(scenario)


def test_an_unknown_option_is_an_error():
    with pytest.raises(lowtide.InvalidInputError, match="use_reentrant"):
        lowtide.checkpoint(torch.sin, use_reentrant=False)


def test_it_works_as_a_decorator(compare, train):
    def scenario(region):
        @region
        def plain(x):
            return torch.sin(torch.sin(x))

        return train(plain)

    compare(scenario)


@pytest.mark.parametrize("op", [F.relu_, torch.Tensor.tanh_, lambda x: F.leaky_relu_(x, 0.1), lambda x: x.mul_(2).sin_()])
def test_an_in_place_op_on_the_regions_own_input(compare, op):
    def scenario(region):
        run = region(lambda x: torch.sin(op(x)) * 2)
        seen = []
        for _ in range(4):
            leaf = torch.randn(4, requires_grad=True)
            h = leaf * 1
            run(h).sum().backward()
            seen.append((leaf.grad, h))
        return seen

    compare(scenario)


def test_an_in_place_op_on_an_input_that_is_also_returned(compare):
    def scenario(region):
        weight = torch.randn(4, requires_grad=True)
        run = region(lambda x: (x.mul_(weight).tanh_(), torch.sin(x)))
        seen = []
        for _ in range(4):
            leaf = torch.randn(4, requires_grad=True)
            one, two = run(leaf * 1)
            (one * two).sum().backward()
            seen.append((leaf.grad, one, two, weight.grad.clone()))
        return seen

    compare(scenario)


def test_an_in_place_op_on_an_input_without_gradient(compare):
    def scenario(region):
        linear = nn.Linear(4, 4)
        run = region(lambda x: torch.tanh(linear(x.add_(1))))
        seen = []
        for _ in range(4):
            x = torch.randn(2, 4)
            run(x).sum().backward()
            seen.append((x, [p.grad.clone() for p in linear.parameters()]))
        return seen

    compare(scenario)


def test_a_frozen_input_with_trainable_weights(compare):
    def scenario(region):
        frozen, adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
        prompt = nn.Parameter(torch.randn(1, 4))
        run = region(lambda x: torch.tanh(frozen(torch.cat([x, prompt]))) + adapter(torch.cat([x, prompt])))
        seen = []
        for _ in range(4):
            run(torch.randn(2, 4)).square().sum().backward()
            seen.append([p.grad.clone() for p in (*adapter.parameters(), prompt)])
        return seen, [p.grad for p in frozen.parameters()]

    compare(scenario)


class _Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclasses.dataclass
class _Carrier:
    x: torch.Tensor
    name: str


def test_structured_inputs_and_outputs_keep_their_types(compare):
    def scenario(region):
        def fn(pair, carrier, nested, ordered):
            left = torch.sin(pair.left) * carrier.x
            return {
                "pair": _Pair(torch.sin(left), None),
                "carrier": _Carrier(torch.sin(left * nested[0][1]), carrier.name),
                "nested": [[left, None], (torch.cos(left), "text")],
                "ordered": collections.OrderedDict(a=torch.exp(ordered["a"])),
                "none": None,
            }

        run = region(fn)
        seen = []
        for _ in range(4):
            a, b, c, d = (torch.randn(4, requires_grad=True) for _ in range(4))
            out = run(_Pair(a, None), _Carrier(b, "n"), [[None, c]], collections.OrderedDict(a=d))
            assert isinstance(out["pair"], _Pair)
            assert isinstance(out["carrier"], _Carrier)
            assert type(out["ordered"]) is collections.OrderedDict
            assert out["none"] is None
            assert out["nested"][1][1] == "text"
            total = out["pair"].left + out["carrier"].x + out["nested"][0][0] + out["nested"][1][0] + out["ordered"]["a"]
            total.sum().backward()
            seen.append([t.grad for t in (a, b, c, d)])
        return seen

    compare(scenario)


def test_an_input_that_is_returned_unchanged(compare):
    def scenario(region):
        run = region(lambda x, y: (x, torch.sin(torch.sin(x) * y), y))
        seen = []
        for _ in range(3):
            x, y = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
            h = x * 2
            one, two, three = run(h, y)
            (one * two * three).sum().backward()
            seen.append((x.grad, y.grad, one is h, three is y))
        return seen

    compare(scenario)


@pytest.mark.parametrize("warm_up", [0, 3])
def test_a_module_that_flips_to_eval_before_backward(compare, warm_up):
    def scenario(region):
        block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())
        run = region(block)
        seen = []
        for step in range(warm_up + 1):
            x = torch.randn(3, 4, requires_grad=True)
            out = run(x)
            if step == warm_up:
                block.eval()
            out.sum().backward()
            seen.append((x.grad, [p.grad.clone() for p in block.parameters()]))
        return seen, dict(block.state_dict()), [m.training for m in block.modules()]

    compare(scenario)


def test_a_module_that_is_frozen_before_backward_names_itself_or_replays():
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    run = lowtide.checkpoint(block)
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(block(x).sum(), x)[0]
    out = run(x)
    block[2].requires_grad_(False)
    try:
        out.sum().backward()
    except ReplayError as error:
        assert "2.weight" in str(error)  # noqa: PT017
    else:
        assert torch.equal(x.grad, expected)
