"""``use_reentrant=True``: PyTorch's contract, without its wrong results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide.torch_compat as ours


def _block():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 4))


def test_gradients_equal_the_plain_ones(api):
    block, x = _block(), torch.randn(3, 4, requires_grad=True)
    state = torch.get_rng_state()
    block(x).square().sum().backward()
    expected = [t.grad.clone() for t in (x, *block.parameters())]
    x.grad = None
    block.zero_grad()
    torch.set_rng_state(state)
    api.checkpoint(block, x, use_reentrant=True).square().sum().backward()
    assert all(torch.equal(t.grad, e) for t, e in zip((x, *block.parameters()), expected, strict=True))


def test_by_its_older_name(api):
    x = torch.randn(3, requires_grad=True)
    api.CheckpointFunction.apply(lambda t: torch.sin(torch.exp(t)), True, x).sum().backward()
    expected = torch.autograd.grad(torch.sin(torch.exp(x)).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_asking_for_some_gradients_only_is_refused(api):
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is incompatible"):
        torch.autograd.grad(api.checkpoint(torch.exp, x, use_reentrant=True).sum(), x)
    with pytest.raises(RuntimeError, match=r"torch\.utils\.checkpoint is incompatible"):
        api.checkpoint(torch.exp, x, use_reentrant=True).sum().backward(inputs=[x])
    api.checkpoint(torch.exp, x, use_reentrant=True).sum().backward()
    assert torch.equal(x.grad, torch.exp(x.detach()))


def test_a_backward_where_no_output_needs_a_gradient_is_refused(api):
    def fn(_, other):
        return other

    out = api.checkpoint(fn, torch.ones(2, requires_grad=True), torch.ones(2), use_reentrant=True)
    with pytest.raises(RuntimeError, match="none of output has requires_grad=True"):
        out.sum().backward()


def test_only_positional_arguments(api):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        api.checkpoint(torch.sin, x, use_reentrant=True, scale=2)
    with pytest.raises(ValueError, match="only supported when use_reentrant=False"):
        api.checkpoint(torch.sin, x, use_reentrant=True, debug=True)


def test_outputs_that_are_no_tensors_pass_through(api):
    out, text = api.checkpoint(lambda x: (torch.sin(torch.exp(x)), "text"), torch.ones(2, requires_grad=True), use_reentrant=True)
    assert text == "text"
    out.sum().backward()


def test_two_backwards_through_a_retained_graph(api):
    x = torch.randn(3, requires_grad=True)
    out = api.checkpoint(lambda t: torch.sin(torch.exp(t)), x, use_reentrant=True).sum()
    out.backward(retain_graph=True)
    first = x.grad.clone()
    out.backward()
    assert torch.equal(x.grad, first * 2)


@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
def test_nested_forms_mix(api):
    x = torch.randn(3, requires_grad=True)

    def inner(t):
        return torch.sin(torch.exp(t))

    for outer_form in (True, False):
        for inner_form in (True, False):
            x.grad = None

            def outer(t, form=inner_form):
                return torch.cos(api.checkpoint(inner, torch.sin(t), use_reentrant=form))

            api.checkpoint(outer, x, use_reentrant=outer_form).sum().backward()
            torch.testing.assert_close(x.grad, torch.autograd.grad(torch.cos(inner(torch.sin(x))).sum(), x)[0])


def test_weights_get_their_gradients_though_no_input_needs_one():
    block, x = _block().eval(), torch.randn(3, 4)
    expected = torch.autograd.grad(block(x).sum(), list(block.parameters()))
    ours.checkpoint(block, x, use_reentrant=True).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(block.parameters(), expected, strict=True))


def test_tensors_in_containers_get_their_gradients():
    x = torch.randn(3, requires_grad=True)
    out = ours.checkpoint(lambda batch: {"out": [torch.sin(torch.exp(batch["x"]))]}, {"x": x}, use_reentrant=True)
    out["out"][0].sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(torch.sin(torch.exp(x)).sum(), x)[0])


def test_what_a_call_returns_comes_from_one_node(api):
    x = torch.randn(3, requires_grad=True)
    one, same = api.checkpoint(lambda t: (torch.sin(torch.exp(t)), t), x, use_reentrant=True)
    one.sum().backward(retain_graph=True)
    same.sum().backward()
    torch.testing.assert_close(x.grad, 1 + torch.exp(x.detach()) * torch.cos(torch.exp(x.detach())))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        same.sum().backward()


def test_what_a_call_returns_may_be_changed_in_place(api):
    x = torch.randn(3, requires_grad=True)
    out = api.checkpoint(lambda t: torch.sin(torch.exp(t)), x, use_reentrant=True)
    out += x
    out.mul_(2).sum().backward()
    torch.testing.assert_close(x.grad, 2 + 2 * torch.exp(x.detach()) * torch.cos(torch.exp(x.detach())))


def test_integers_among_the_outputs_need_no_gradients(api):
    x = torch.randn(3, requires_grad=True)
    values, indices = api.checkpoint(lambda t: tuple(torch.exp(t).sort()), x, use_reentrant=True)
    assert not indices.requires_grad
    values.sum().backward()
    assert torch.equal(x.grad, torch.exp(x.detach()))
