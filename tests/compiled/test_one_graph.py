"""Regions that the compiler takes into its graph: the same decisions and the same gradients as in Python."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import lowtide
from lowtide.records import CallSite, Decision

from ._models import Autocast, Dropout, Inner, Statistics, Transformer, kept_bytes, stack, steps

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def results_of_modules(site: CallSite) -> Decision:
    kept = site.level == "module" and site.module.endswith((".down", ".norm"))
    return Decision.KEEP if kept else Decision.RECOMPUTE


POLICIES = [
    "full",
    "every:2",
    "selective",
    "attention",
    "torchtitan",
    "dots_saveable",
    "save_only_these_names:up",
    "save_anything_except_these_names:act",
    results_of_modules,
]
LESS_IN_A_GRAPH = ["every:2", "save_anything_except_these_names:act"]
"""The compiler knows what backward never asks for, in blocks outside of regions too, and does not save that."""


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_kept_in_a_graph_is_what_is_kept_in_python(policy):
    plain, model = stack(Transformer), stack(Transformer)
    lowtide.apply(model, policy)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    rows = 8, 8  # one size, compiled once: sizes that change are another test's
    for found, expected in zip(steps(compiled, model, rows), steps(plain, plain, rows), strict=True):
        assert torch.equal(found, expected)
    steps(model, model, rows)
    # Attention counts as random in a graph: for each that runs again the state of the generator is kept.
    states = [count * torch.get_rng_state().nbytes for count in range(4)]
    in_graph, in_python = kept_bytes(compiled), kept_bytes(model)
    assert in_python < kept_bytes(plain)
    if policy in LESS_IN_A_GRAPH:
        assert in_python // 2 < in_graph < in_python + states[-1]
    else:
        assert in_graph - in_python in states


@pytest.mark.parametrize("kind", [Statistics, Dropout, Inner, Autocast])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_gradients_are_those_of_the_plain_model_in_python(kind, policy):
    plain, model = stack(kind), stack(kind)
    lowtide.apply(model, policy)
    backend = CompileCounterWithBackend("aot_eager")
    found = steps(torch.compile(model, backend=backend, fullgraph=True), model)
    assert backend.frame_count == 2  # one for the first size of batch, one for all others
    for one, other in zip(found, steps(plain, plain), strict=True):
        assert torch.equal(one, other)


def test_a_plan_is_carried_out_in_a_graph():
    model, x = stack(Transformer), torch.randn(8, 16)
    result = lowtide.fit(model, lambda: model(x).square().sum().backward(), budget="85%", rounds=1)
    assert result.plan.regions
    plain = stack(Transformer)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for one, other in zip(steps(compiled, model), steps(plain, plain), strict=True):
        assert torch.equal(one, other)
    steps(model, model)
    in_python = kept_bytes(model)
    assert in_python // 2 < kept_bytes(compiled) < in_python + 3 * torch.get_rng_state().nbytes < kept_bytes(plain)


def test_inductor_replays_the_same_dropout():
    model, plain = stack(Dropout), stack(Dropout)
    lowtide.apply(model, "full")
    with torch._inductor.config.patch(fallback_random=True):
        found = steps(torch.compile(model, fullgraph=True), model, rows=(8,))
    for one, other in zip(found, steps(plain, plain, rows=(8,)), strict=True):
        torch.testing.assert_close(one, other)


def test_regions_that_are_taken_out_or_disabled_are_no_longer_in_the_graph():
    model = stack(Transformer)
    compiled, plain = torch.compile(model, backend="aot_eager", fullgraph=True), kept_bytes(model)
    assert kept_bytes(compiled) == plain
    handle = lowtide.apply(model, "full")
    assert kept_bytes(compiled) < plain
    with handle.disabled():
        assert kept_bytes(compiled) == plain
    assert kept_bytes(compiled) < plain
    handle.remove()
    assert kept_bytes(compiled) == plain


def test_a_rule_that_matches_nothing_is_an_error_of_compiling():
    model = stack(Transformer)
    handle = lowtide.apply(model, "save_only_these_names:upp")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"upp.*matched nothing.*did you mean up"):
        steps(torch.compile(model, backend="aot_eager"), model)
    assert handle.regions == ()


@pytest.mark.parametrize("decorated", [True, False])
def test_functions_that_are_regions(decorated):
    weight = torch.randn(4, 4, requires_grad=True)

    def body(x, *, debug=2.0):
        return torch.sin(x @ weight).cos() * debug

    region = lowtide.checkpoint(body)
    compiled = torch.compile(region if decorated else lambda x, **kwargs: region(x, **kwargs) + 1, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 4, requires_grad=True)
    expected = torch.autograd.grad(body(x, debug=3.0).sum(), (x, weight))
    found = torch.autograd.grad(compiled(x, debug=3.0).sum(), (x, weight))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"check_values": True}, {"audit_every": 0}, {"policy": "selective"}], ids=str)
def test_a_region_that_is_made_in_a_compiled_function(options):
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)
    compiled = torch.compile(lambda x: lowtide.checkpoint(lambda x: torch.tanh(x @ weight), **options)(x).sum(), backend="aot_eager")
    found, expected = torch.autograd.grad(compiled(x), weight)[0], torch.autograd.grad(torch.tanh(x @ weight).sum(), weight)[0]
    assert torch.equal(found, expected)
