"""Inside ``torch.compile`` the compiler replays: it is given what PyTorch's own function would give it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import CheckpointPolicy

import lowtide.torch_compat


def _fn(x, weight):
    return torch.sigmoid(x @ weight).sin()


def _keep_products(_context, op, *_args, **_kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def _gradients(run):
    torch.manual_seed(3)
    x, weight = torch.randn(2, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    run(x, weight).sum().backward()
    return x.grad, weight.grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("policy", [None, _keep_products])
def test_a_compiled_step_is_one_graph_with_the_region_marked(api, policy):
    contexts = {} if policy is None else {"context_fn": functools.partial(api.create_selective_checkpoint_contexts, policy)}
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w: api.checkpoint(_fn, x, w, use_reentrant=False, **contexts) + 1, backend=backend, fullgraph=True)
    found, expected = _gradients(compiled), _gradients(_fn)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    marked = [node for node in backend.graphs[0].graph.nodes if node.target is torch.ops.higher_order.tag_activation_checkpoint]
    assert len(marked) == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_library_that_was_compiled_under_substitution():
    def step(x, weight):
        return torch.utils.checkpoint.checkpoint(_fn, x, weight, use_reentrant=False)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    with lowtide.torch_compat.substituted():
        found = _gradients(compiled)
    assert all(torch.equal(one, other) for one, other in zip(found, _gradients(_fn), strict=True))
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_region_that_reads_a_buffer_and_writes_to_it_is_an_error():
    """PyTorch's own function gives a wrong gradient there."""
    mean = torch.ones(4)

    def body(x):
        mean.mul_(0.9).add_(x.detach().mean(0))
        return torch.tanh(x * mean)

    compiled = torch.compile(lambda x: lowtide.torch_compat.checkpoint(body, x, use_reentrant=False), backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"cannot replay a region rightly.*reads a tensor of shape \(4,\)"):
        compiled(torch.randn(3, 4, requires_grad=True))
    torch._dynamo.reset()
