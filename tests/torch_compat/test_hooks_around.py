"""The user's saved-tensor hooks around a call: what they are handed, and for how long they are held."""

from __future__ import annotations

import gc
import weakref

import torch
from torch.autograd.graph import saved_tensors_hooks

from lowtide.torch_compat import checkpoint


class _Hooks:
    """Hooks with an owner, who may hold anything."""

    def __init__(self):
        self.packed = []
        self.results = []

    def pack(self, tensor):
        self.packed.append(tuple(tensor.shape))
        return tensor.detach() * 2

    def unpack(self, packed):
        return packed / 2

    def around(self):
        return saved_tensors_hooks(self.pack, self.unpack)


def test_an_owner_of_hooks_may_hold_the_result():
    """Autograd holds what a call keeps where the garbage collector cannot look: to hold the hooks there as well would be a leak.

    PyTorch's own function leaks them up to 2.12.
    """

    def scenario():
        hooks, weight = _Hooks(), torch.randn(4, 4, requires_grad=True)
        with hooks.around():
            result = checkpoint(lambda: torch.mm(weight, weight).relu().sum(), use_reentrant=False)
        hooks.results.append(result)
        return weakref.ref(hooks), weakref.ref(result)

    for _ in range(3):  # the first call is watched, others are not
        hooks, result = scenario()
        gc.collect()
        assert hooks() is None
        assert result() is None


def test_hooks_are_handed_what_is_passed_and_no_weight_that_the_function_refers_to():
    weight = torch.randn(5, 3, requires_grad=True)

    def body(x):
        return (x @ weight).sin() * weight.sum()

    for _ in range(3):
        hooks, x = _Hooks(), torch.randn(2, 5, requires_grad=True)
        with hooks.around():
            result = checkpoint(body, x, use_reentrant=False)
        found = torch.autograd.grad(result.sum(), [x, weight])
        assert hooks.packed == [(2, 5)]
        assert all(torch.equal(one, other) for one, other in zip(found, torch.autograd.grad(body(x).sum(), [x, weight]), strict=True))


def test_a_weight_that_is_passed_as_well_is_handed_to_hooks_once():
    weight = torch.randn(4, 4, requires_grad=True)
    for _ in range(3):
        hooks = _Hooks()
        with hooks.around():
            result = checkpoint(lambda passed: (passed @ weight).sin(), weight, use_reentrant=False)
        found = torch.autograd.grad(result.sum(), weight)[0]
        assert hooks.packed == [(4, 4)]
        assert torch.equal(found, torch.autograd.grad((weight @ weight).sin().sum(), weight)[0])


def test_activations_that_the_function_refers_to_are_handed_to_hooks():
    """PyTorch holds them in the closure, where no hook sees them: offloading then saves nothing."""
    for _ in range(3):
        hooks, x = _Hooks(), torch.randn(4, 4, requires_grad=True)
        hidden = x.exp()
        with hooks.around():
            result = checkpoint(lambda hidden=hidden: hidden.sin() * 3, use_reentrant=False)
        assert hooks.packed == [(4, 4)]
        assert torch.equal(torch.autograd.grad(result.sum(), x)[0], torch.autograd.grad((x.exp().sin() * 3).sum(), x)[0])
