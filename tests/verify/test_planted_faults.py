"""``verify`` finds each kind of fault, names the tensor and the first op whose replay differs, and finds nothing where there is none."""

from __future__ import annotations

import itertools
import queue
import random

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import is_replaying

NOISE = random.SystemRandom()
KERNELS = itertools.count()


def keep_products(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mul.Tensor else CheckpointPolicy.PREFER_RECOMPUTE


def by_torch(block, x, **options):
    return checkpoint(block, x, use_reentrant=False, **options)


def selectively(block, x):
    return by_torch(block, x, context_fn=lambda: create_selective_checkpoint_contexts(keep_products, allow_cache_entry_mutation=True))


def hidden_mask(_block, h):
    """A mask from a place that no guard knows."""
    drawn = torch.rand(h.shape, generator=torch.Generator().manual_seed(1 + is_replaying()))
    return torch.sin(h * (drawn > 0.5))


def written_product(_block, h):
    return torch.sigmoid_(h * 2.0) * h


def counted(block, h):
    block.count.add_(1)
    return h * block.count


def noisy(_block, h):
    return torch.sin(h * (1 + 1e-5 * NOISE.random()))


def another_kernel(_block, h):
    """Its values are far from what they were in forward, by chance; in forward they are off by next to nothing."""
    return torch.sin(h * (1 + NOISE.random() * (1.0 if is_replaying() else 1e-5)))


def half_in_replay(_block, h):
    with torch.autocast("cpu", torch.bfloat16, enabled=is_replaying()), torch.no_grad():
        scale = (h.float() @ h.float().T @ h.float()).float()
    return torch.sin(scale * h)


def late_bound(model):
    """Lambdas made in a loop that read its variable when they run."""
    holder = {}

    def call(block, x):
        holder["block"] = block
        return checkpoint(lambda y: holder["block"](y), x, use_reentrant=False)  # noqa: PLW0108

    return call


def halve_weight(model):
    model.blocks[2].down.weight.data.mul_(0.5)


def dropped(_block, h):
    return F.dropout(h, 0.5)


def verified(model, step, **options):
    found = lowtide.verify(model, step, **options)
    assert not found.equal, found.report()
    with pytest.raises(lowtide.VerificationError):
        found.raise_if_different()
    return found


@pytest.mark.parametrize(
    ("fault", "op"), [(hidden_mask, "aten.mul.Tensor"), (half_in_replay, "aten.mul.Tensor"), (another_kernel, "aten.sin.default")]
)
def test_what_a_replay_of_lowtide_cannot_know(net, fault, op):
    found = verified(*net(fault))
    assert found.repeatable is (fault is not another_kernel)
    assert (found.first_op.region, found.first_op.op) == ("blocks.2", op)
    assert found.first_op.source.startswith("test_planted_faults.py:")
    assert found.worst.name.startswith("gradient of blocks.")
    assert found.worst.region in ("blocks.0", "blocks.1", "blocks.2")
    assert found.worst.name.startswith(f"gradient of {found.worst.region}.")
    assert found.worst.step == 1


@pytest.mark.parametrize(
    ("fault", "call", "different", "op"),
    [
        (dropped, lambda b, x: by_torch(b, x, preserve_rng_state=False), "gradient of blocks.2.", "aten.bernoulli_.float"),
        (counted, by_torch, "buffer blocks.2.count", "aten.add_.Tensor"),
        (written_product, selectively, "gradient of blocks.2.", "aten.mul.Tensor"),
    ],
    ids=["dropout mask", "buffer", "in-place kept tensor"],
)
def test_faults_of_a_step_that_calls_torch_checkpoint(net, fault, call, different, op):
    model, step = net(fault, call=call)
    found = verified(model, step)
    assert any(name.startswith(different) for name in found.different), found.different
    assert found.regions == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    assert (found.first_op.region, found.first_op.op) == ("blocks.2", op)
    assert f"{op} at " in found.report()


def test_a_late_bound_closure(net):
    model, step = net(call=late_bound(None))
    found = verified(model, step)
    assert found.first_op.op == "aten.t.default"  # of the weight
    assert any(name.startswith("gradient of blocks.0.") for name in found.different)


def test_a_weight_that_is_changed_behind_the_back_of_autograd(net):
    model, step = net(call=by_torch, between=halve_weight)
    found = verified(model, step)
    assert any(name.startswith("gradient of blocks.2.") for name in found.different)


def test_a_region_of_lowtide_says_itself_that_a_weight_was_changed(net):
    found = verified(*net(call=lambda block, x: lowtide.checkpoint(block)(x), between=halve_weight))
    assert found.error.startswith("InputChangedError")
    assert "through .data" in found.error


def test_a_step_that_does_not_repeat_itself_is_compared_within_its_spread(net):
    found = lowtide.verify(*net(noisy))
    assert found.equal
    assert not found.repeatable
    assert 0 < found.unsteady.distance < 1e-2
    assert found.first_op.region == "blocks.2"
    assert "differs from itself" in found.report()


def test_an_error_in_a_replay_is_a_verdict(net):
    def grows(block, h):
        return torch.sin(torch.sin(h)) if is_replaying() else h

    found = verified(*net(grows))
    assert "ReplayMismatchError" in found.error
    assert found.first_op.region == "blocks.2"


@pytest.mark.parametrize("call", [by_torch, lambda block, x: lowtide.checkpoint(block, name="by hand")(x)], ids=["torch", "lowtide"])
def test_an_error_in_a_replay_of_the_steps_own_is_a_verdict(net, call):
    def fails(_, h):
        if torch._C._current_graph_task_id() != -1:
            raise ValueError("only in a replay")
        return torch.sin(h)

    found = verified(*net(fails, call=call))
    assert found.error == "ValueError: only in a replay"


def test_autocast_is_not_blamed_on_the_replay(net):
    found = lowtide.verify(*net(), three_way=True)
    assert found.equal
    assert found.precision.plain == found.precision.checkpointed > 1e-4
    assert found.precision.dtype == "bfloat16"


def test_backward_and_the_optimizer_are_outside_of_the_autocast_that_is_put_around_a_step(net):
    seen = queue.SimpleQueue()  # not among what is put back after a step

    def looks(_, h):
        if h.requires_grad:
            h.register_hook(lambda _: seen.put(torch.is_autocast_enabled("cpu")))
        return h

    model, step = net(looks)
    lowtide.verify(model, step, three_way=True, steps=1)
    assert not seen.empty()
    while not seen.empty():
        assert not seen.get()


def test_a_replay_under_another_precision_is_not_blamed_on_autocast(net):
    found = verified(*net(half_in_replay), three_way=True)
    assert found.first_op.region == "blocks.2"
    assert found.precision.plain > 1e-4
