"""Every way of asking for gradients gives what the plain run gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * x * weight

    @staticmethod
    def backward(ctx, grad):
        x, _ = ctx.saved_tensors
        _, weight = ctx.saved_tensors
        again, _ = ctx.saved_tensors
        assert torch.equal(x, again)
        return grad * 2 * x * weight, grad * x * x


def test_saved_tensors_read_twice_in_a_custom_function(compare):
    def scenario(region):
        weight = torch.randn(4, requires_grad=True)
        run = region(lambda x: _Squared.apply(torch.sin(x), torch.sin(weight)))
        seen = []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            run(x).sum().backward()
            seen.append((x.grad, weight.grad.clone()))
        return seen

    compare(scenario)


def test_saved_tensors_read_outside_of_backward(compare):
    def scenario(region):
        out = region(lambda x: torch.exp(torch.sin(x) * 2) * 1)(torch.ones(3, requires_grad=True))
        node = out.grad_fn.next_functions[0][0]
        values = [node._saved_result.clone(), node._saved_result.clone()]
        out.sum().backward()
        with pytest.raises(RuntimeError, match="freed"):
            _ = node._saved_result
        return values

    compare(scenario)


def _block(region, *, dropout=0.3):
    block = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 4), nn.Sigmoid())
    return block, region(block)


@pytest.mark.parametrize("nested", [False, True])
def test_two_backwards_through_a_retained_graph(compare, nested):
    def scenario(region):
        block, run = _block(region)
        call = region(lambda x: torch.sin(run(torch.sin(x)))) if nested else run
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            out = call(x).sum()
            out.backward(retain_graph=True)
            seen.append(x.grad.clone())
            out.backward()
            seen.append((x.grad, [p.grad.clone() for p in block.parameters()]))
        return seen

    compare(scenario)


def test_a_second_backward_without_retaining_is_autograds_own_error():
    out = lowtide.checkpoint(lambda x: torch.sin(torch.sin(x)))(torch.randn(3, requires_grad=True)).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


@pytest.mark.parametrize("nested", [False, True])
def test_a_gradient_penalty(compare, nested):
    def scenario(region):
        block, run = _block(region)
        call = region(lambda x: torch.sin(run(torch.sin(x)))) if nested else run
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            out = call(x).square().sum()
            (grad,) = torch.autograd.grad(out, x, create_graph=True)
            (out + grad.square().sum()).backward()
            seen.append((grad, x.grad, [p.grad.clone() for p in block.parameters()]))
        return seen

    compare(scenario)


def test_third_order_gradients(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(torch.exp(torch.sin(x))))
        x = torch.randn(3, requires_grad=True)
        seen = [run(x).sum()]
        for _ in range(3):
            (grad,) = torch.autograd.grad(seen[-1].sum(), x, create_graph=True)
            seen.append(grad)
        return seen

    compare(scenario)


def test_gradients_for_chosen_inputs(compare):
    def scenario(region):
        block, run = _block(region)
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            loss = run(x).square().sum()
            seen.append(torch.autograd.grad(loss, block[3].weight, retain_graph=True))
            seen.append(torch.autograd.grad(loss, [x, block[0].weight], retain_graph=True))
            loss.backward(inputs=[block[0].bias])
            seen.append([block[0].bias.grad.clone(), block[0].weight.grad, x.grad])
        return seen

    compare(scenario)


def test_a_backward_inside_the_region(compare):
    def scenario(region):
        def fn(x):
            energy = torch.sin(torch.exp(torch.sin(x))).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return torch.sin(force) * 2

        run = region(fn)
        seen = []
        for _ in range(3):
            x = torch.randn(3, requires_grad=True)
            run(x).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_a_backward_inside_the_region_that_frees_its_graph(compare):
    def scenario(region):
        def fn(x):
            (force,) = torch.autograd.grad(torch.exp(torch.sin(x)).sum(), x)
            return torch.sin(torch.cos(x)) * force

        run = region(fn)
        seen = []
        for _ in range(3):
            x = torch.randn(3, requires_grad=True)
            run(x).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_nested_regions_with_backwards_at_each_level(compare):
    def scenario(region):
        def gradient(fn):
            def of(x):
                with torch.enable_grad():
                    return torch.autograd.grad(fn(x).sum(), x, create_graph=True)[0]

            return of

        def base(x):
            return torch.sin(torch.exp(torch.sin(x)))

        x = torch.randn(3, requires_grad=True)
        return [
            gradient(region(gradient(region(base))))(x),
            gradient(region(gradient(gradient(region(base)))))(x),
            region(gradient(region(gradient(base))))(x),
        ]

    compare(scenario)


def test_hessian_vector_products_in_float64(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(x).pow(3).sum() * torch.exp(x).sum())
        x = torch.randn(4, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(run, x)
        torch.autograd.gradgradcheck(run, x)
        return torch.autograd.functional.hvp(run, x, torch.ones_like(x))

    compare(scenario)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian", "per sample", "vjp", "vmap"])
def test_function_transforms(compare, transform):
    def scenario(region):
        weight = torch.randn(4, 4)
        inner = region(lambda x: torch.sin(x @ weight) * torch.exp(x))

        def loss(x):
            return torch.sin(inner(x)).sum()

        x = torch.randn(4)
        calls = {
            "grad": lambda: torch.func.grad(loss)(x),
            "jacrev": lambda: torch.func.jacrev(inner)(x),
            "jacfwd": lambda: torch.func.jacfwd(inner)(x),
            "hessian": lambda: torch.func.hessian(loss)(x),
            "per sample": lambda: torch.func.vmap(torch.func.grad(loss))(torch.randn(3, 4)),
            "vjp": lambda: torch.func.vjp(inner, x)[1](torch.ones(4)),
            "vmap": lambda: torch.func.vmap(inner)(torch.randn(3, 4)),
        }
        return [calls[transform]() for _ in range(2)]

    compare(scenario)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_region_works_after_it_was_differentiated_by_torch_func(compare):
    def scenario(region):
        run = region(lambda x: torch.sin(torch.exp(torch.sin(x))))
        first = torch.func.grad(lambda x: run(x).sum())(torch.ones(3))
        x = torch.ones(3, requires_grad=True)
        run(x).sum().backward()
        return first, x.grad

    compare(scenario)


@pytest.mark.filterwarnings("ignore:region .* runs under", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_forward_mode_derivatives(compare):
    import torch.autograd.forward_ad as forward_ad

    def scenario(region):
        run = region(lambda x: torch.sin(torch.exp(x)))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.ones(3, requires_grad=True), torch.full((3,), 2.0))
            return forward_ad.unpack_dual(run(dual)).tangent

    compare(scenario)


@pytest.mark.parametrize("kept", ["first", "second", "both"])
def test_losses_on_some_of_the_outputs(compare, kept):
    def scenario(region):
        def fn(x):
            early = torch.sin(torch.sin(x))
            return early, torch.exp(torch.cos(early))

        run = region(fn)
        seen = []
        for _ in range(4):
            x = torch.randn(4, requires_grad=True)
            first, second = run(x)
            {"first": first, "second": second, "both": first * second}[kept].sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_two_losses_with_separate_backwards(compare):
    def scenario(region):
        block, run = _block(region)
        head = region(lambda h: (torch.sin(h), torch.exp(torch.sin(h))))
        seen = []
        for _ in range(3):
            x = torch.randn(2, 4, requires_grad=True)
            one, two = head(run(x))
            one.sum().backward(retain_graph=True)
            two.sum().backward()
            seen.append((x.grad, [p.grad.clone() for p in block.parameters()]))
        return seen

    compare(scenario)


def test_hooks_on_tensors_and_nodes_run_once_a_backward(compare):
    calls = []

    def scenario(region):
        calls.clear()
        weight = torch.randn(4, requires_grad=True)
        weight.register_hook(lambda grad: calls.append("weight") or grad * 2)

        def fn(x):
            h = torch.sin(x * weight)
            if h.requires_grad and not lowtide.is_replaying():
                h.register_hook(lambda grad: grad * 3)
            return torch.sin(h) * weight

        x = torch.randn(4, requires_grad=True)
        region(fn)(x * weight).sum().backward()
        return x.grad, weight.grad, len(calls)

    compare(scenario)


def _zero_a_row(y):
    y[0].zero_()
    return y


@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.mul_(2), _zero_a_row])
def test_an_output_changed_in_place_later(change):
    """Plain autograd refuses, since tanh's backward needs its output. The region may refuse or be right, never be wrong."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4, requires_grad=True)
    expected = torch.autograd.grad(change(block(x).clone()).sum(), x)[0]
    y = lowtide.checkpoint(block)(x)
    change(y)
    try:
        y.sum().backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
    else:
        assert torch.equal(x.grad, expected)


def test_an_output_that_no_backward_needs_may_be_changed_in_place(compare, train):
    def scenario(region):
        linear = nn.Linear(4, 4)
        run = region(lambda x: linear(torch.sin(x)) + x)
        return train(lambda x: F.relu_(run(x)), linear)

    compare(scenario)


def test_complex_and_integer_tensors(compare):
    def scenario(region):
        def fn(x, index):
            spectrum = torch.fft.rfft(torch.sin(x))
            return (spectrum * spectrum.conj()).real[index], index + 1

        run = region(fn)
        seen = []
        for _ in range(3):
            x = torch.randn(8, requires_grad=True)
            out, index = run(x, torch.tensor([0, 2, 2]))
            out.sum().backward()
            seen.append((out, index, x.grad))
        return seen

    compare(scenario)


def test_views_and_in_place_ops_inside(compare, train):
    def scenario(region):
        linear = nn.Linear(4, 4)

        def fn(x):
            h = linear(x)
            h[:, :2].tanh_()
            left, right = h.chunk(2, dim=1)
            out = torch.cat([torch.sin(left), right.t().contiguous().t() * left], dim=1)
            return out.view(-1).unfold(0, 4, 4)

        return train(region(fn), linear)

    compare(scenario)


def test_an_output_that_is_a_view_of_an_input(compare):
    def scenario(region):
        run = region(lambda x: (x.view(2, 2), torch.sin(torch.sin(x))))
        seen = []
        for _ in range(3):
            x = torch.randn(4, requires_grad=True)
            h = x * 2
            view, other = run(h)
            (torch.sin(view).view(4) * other).sum().backward()
            seen.append(x.grad)
        return seen

    compare(scenario)


def test_sparse_embedding_gradients(compare):
    def scenario(region):
        table = nn.Embedding(8, 4, sparse=True)
        run = region(lambda index: torch.sin(table(index)) * 2)
        for _ in range(3):
            run(torch.tensor([1, 1, 5])).sum().backward()
        return table.weight.grad.to_dense()

    compare(scenario)


@pytest.mark.parametrize("change", [lambda y: y.mul_(2), lambda y: y.t().add_(1), lambda y: y.relu_().sub_(1)])
def test_a_saved_result_that_the_next_op_changes_is_the_error_of_plain_autograd(change):
    def fn(x):
        y = torch.exp(torch.sin(x))
        change(y)
        return torch.sin(y)

    for call in (fn, run := lowtide.checkpoint(fn), run):
        x = torch.ones(2, 2, requires_grad=True)
        y = call(x * 1).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
