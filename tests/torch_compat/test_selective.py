"""Contexts that keep what some ops returned."""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

import lowtide.torch_compat as ours

aten = torch.ops.aten

# Before torch 2.13 a policy was asked again in the replay, and was not shown what an op had returned.
numbered = pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "_CONSUMED"), reason="PyTorch's modes do not number calls yet")


def _keeping(api, policy, **options):
    return functools.partial(api.create_selective_checkpoint_contexts, policy, **options)


def _sines(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is aten.sin.default else CheckpointPolicy.PREFER_RECOMPUTE


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", [[aten.mm.default], lambda _c, op, *_a, **_k: op is aten.mm.default])
def test_what_is_kept_is_not_computed_again(api, policy):
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)

    def fn(x, y):
        return torch.sin(torch.mm(torch.cos(x), y)).sum()

    expected = torch.autograd.grad(fn(x, y), (x, y))
    out = api.checkpoint(fn, x, y, use_reentrant=False, context_fn=_keeping(api, policy))
    with _Count(aten.mm.default) as mode:
        grads = torch.autograd.grad(out, (x, y))
    assert mode.count == 2
    assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


@numbered
def test_the_policy_is_asked_once_an_op_and_only_in_the_forward(api):
    asked = []

    def policy(context, op, *_args, **_kwargs):
        asked.append((op, context.is_recompute, context.op_output is not None))
        return CheckpointPolicy.PREFER_RECOMPUTE

    out = api.checkpoint(lambda x: x.sin().sin(), torch.ones(3, requires_grad=True), use_reentrant=False, context_fn=_keeping(api, policy))
    out.sum().backward()
    assert asked == [(aten.sin.default, False, True)] * 2


def test_several_outputs(api):
    x = torch.randn(3, requires_grad=True)

    def fn(x):
        a, b = torch.var_mean(x)
        return a * b

    out = api.checkpoint(fn, x, use_reentrant=False, context_fn=_keeping(api, [aten.var_mean.correction]))
    assert torch.equal(torch.autograd.grad(out, x)[0], torch.autograd.grad(fn(x), x)[0])


def test_a_kept_result_changed_in_place_is_refused_unless_allowed(api):
    def fn(x):
        return x.sin().mul_(2).cos().exp()

    x = torch.randn(3, requires_grad=True)
    out = api.checkpoint(fn, x, use_reentrant=False, context_fn=_keeping(api, _sines))
    with pytest.raises(RuntimeError, match="has been mutated"):
        out.sum().backward()
    api.checkpoint(fn, x, use_reentrant=False, context_fn=_keeping(api, _sines, allow_cache_entry_mutation=True)).sum().backward()


def test_a_second_backward_is_refused(api):
    out = api.checkpoint(
        lambda x: x.sin().cos().exp(), torch.randn(3, requires_grad=True), use_reentrant=False, context_fn=_keeping(api, _sines)
    )
    out.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        out.sum().backward(retain_graph=True)


@numbered
def test_other_ops_in_the_replay_are_refused(api):
    runs = [0]

    def fn(x):
        runs[0] += 1
        return x.sin().exp() if runs[0] > 1 else x.sin()

    out = api.checkpoint(fn, torch.randn(3, requires_grad=True), use_reentrant=False, early_stop=False, context_fn=_keeping(api, _sines))
    with pytest.raises(RuntimeError, match="not found in storage"):
        out.sum().backward()


def test_lists_hold_op_overloads(api):
    with pytest.raises(ValueError, match="Expected op in `op_list` to be an OpOverload"):
        api.create_selective_checkpoint_contexts([2])
    with pytest.raises(ValueError, match="specific OpOverload"):
        api.create_selective_checkpoint_contexts([aten.sin])
    with pytest.raises(TypeError, match="either a function or a list of ops"):
        api.create_selective_checkpoint_contexts(2)


def test_what_was_kept_goes_with_the_graph_and_with_its_backward(api):
    kept = []

    def policy(context, op, *_args, **_kwargs):
        return CheckpointPolicy.MUST_SAVE

    def fn(x):
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
        out = x.cos().exp()
        entries = mode.storage[aten.exp.default]
        if entries and hasattr(entries[0], "val"):
            kept.append(weakref.ref(entries[0].val))
        return out.sin()

    gc.collect()
    gc.disable()
    try:
        out = api.checkpoint(fn, torch.randn(3, requires_grad=True), use_reentrant=False, context_fn=_keeping(api, policy))
        assert kept[-1]() is not None
        del out
        assert kept[-1]() is None
        out = api.checkpoint(fn, torch.randn(3, requires_grad=True), use_reentrant=False, context_fn=_keeping(api, policy))
        out.sum().backward(retain_graph=True)
        assert kept[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("answer", [None, "MUST_SAVE", 1])
def test_an_answer_that_is_no_decision_is_an_error_at_once(answer):
    with pytest.raises(TypeError, match="must return a CheckpointPolicy"):
        ours.checkpoint(
            torch.sin, torch.ones(3, requires_grad=True), use_reentrant=False, context_fn=_keeping(ours, lambda *_a, **_k: answer)
        )


def test_random_ops_that_are_replayed_draw_what_they_drew_though_others_were_kept():
    def keep_the_first():
        seen = []

        def policy(_context, op, *_args, **_kwargs):
            seen.extend([op] if op is aten.rand.default else [])
            return op is aten.rand.default and len(seen) == 1

        return ours.create_selective_checkpoint_contexts(policy)

    def fn(x):
        return torch.sin(torch.sin(x * torch.rand(8)) * torch.rand(8))

    x = torch.randn(8, requires_grad=True)
    state = torch.get_rng_state()
    expected = torch.autograd.grad(fn(x).sum(), x)[0]
    torch.set_rng_state(state)
    ours.checkpoint(fn, x, use_reentrant=False, context_fn=keep_the_first).sum().backward()
    assert torch.equal(x.grad, expected)
