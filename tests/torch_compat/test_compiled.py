"""Inside ``torch.compile`` the compiler replays: it is given what PyTorch's own function would give it."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch
from functorch.compile import default_partition, nop
from torch._dynamo.backends.common import aot_autograd
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_a_function_that_is_compiled_or_calls_what_is_compiled(api, whole):
    """A call that is watched runs what is compiled as Python, which saves other tensors: so does its replay, then."""
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(_fn, backend=backend)
    region = compiled if whole else lambda x, weight: compiled(x, weight) * 2
    plain = _fn if whole else lambda x, weight: _fn(x, weight) * 2
    for _ in range(4):
        found = _gradients(lambda x, weight: api.checkpoint(region, x, weight, use_reentrant=False))
        assert all(torch.equal(one, other) for one, other in zip(found, _gradients(plain), strict=True))
    assert backend.frame_count > 0
    torch._dynamo.reset()


def _plain_contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()


def _traced(step):
    """The graph of forward and backward that the compiler makes of a step."""
    graphs = []

    def partition(joint, *args, **kwargs):
        graphs.append(joint.print_readable(print_output=False).split("\n", 1)[1])
        return default_partition(joint, *args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    _gradients(torch.compile(step, backend=backend, fullgraph=True))
    torch._dynamo.reset()
    return graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_substitution_the_compiler_traces_what_it_traces_without():
    def step(x, weight):
        contexts = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, _keep_products)
        return torch.utils.checkpoint.checkpoint(_fn, x, weight, use_reentrant=False, context_fn=contexts)

    expected = _traced(step)
    with lowtide.torch_compat.substituted():
        found = _traced(step)
    assert "MUST_SAVE" in expected[0]
    assert [_numbered_anew(graph) for graph in found] == [_numbered_anew(graph) for graph in expected]


def _numbered_anew(graph):
    return re.sub(r"ac_graph_id: \d+", "ac_graph_id", graph)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_under_substitution_the_compiler_refuses_contexts_that_are_no_dispatch_modes():
    def step(x, weight):
        return torch.utils.checkpoint.checkpoint(_fn, x, weight, use_reentrant=False, context_fn=_plain_contexts)

    with lowtide.torch_compat.substituted(), pytest.raises(Exception, match="two `TorchDispatchMode`s"):
        _traced(step)
    torch._dynamo.reset()
