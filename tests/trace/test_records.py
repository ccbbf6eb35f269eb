"""What a trace says about ops, calls, saved tensors and categories."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import StepError
from lowtide.records import Category, Phase
from lowtide.trace import record_step, trace

sys.path.insert(0, str(Path(__file__).parent))
from _steps import accumulation, gpt, no_optimizer, shared


def test_calls_follow_the_module_tree() -> None:
    model, step = gpt()
    traced = trace(model, step)
    by_path = {call.path: call for call in traced.calls}
    assert {path for path, _ in model.named_modules()} == set(by_path)
    block = by_path["blocks.1"]
    assert traced.calls[block.parent].path == "blocks"
    inner = [call for call in traced.calls if call.path.startswith("blocks.1.")]
    assert inner
    assert all(block.start <= call.start <= call.end <= block.end for call in inner)


def test_a_block_reads_what_the_block_before_returned() -> None:
    model, step = gpt()
    by_path = {call.path: call for call in trace(model, step).calls}
    assert by_path["blocks.0"].outputs == by_path["blocks.1"].inputs


def test_every_call_of_a_shared_module_is_seen() -> None:
    model, step = shared()
    assert [call.path for call in trace(model, step).calls].count("block") == 4


class Tries(nn.Module):
    """Catches what an op of its own raises, as code does that tries a decomposition."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.mm(x, x)
        except RuntimeError:
            return self.inner(x)
        raise AssertionError("a product of these shapes was required to fail")


@pytest.mark.parametrize("fake", [False, True])
def test_an_op_that_raises_is_none_of_the_step(fake: bool) -> None:
    model, x = Tries(), torch.randn(2, 4)

    def step() -> None:
        model(x).sum().backward()
        with pytest.raises(RuntimeError):
            torch.mm(x, x)

    traced, plain = trace(model, step, fake=fake), trace(model, lambda: model.inner(x).sum().backward(), fake=fake)
    assert [(op.name, op.workspace_bytes) for op in traced.ops] == [(op.name, op.workspace_bytes) for op in plain.ops]


def test_phases_come_in_order() -> None:
    model, step = gpt()
    phases = [op.phase for op in trace(model, step).ops]
    order = [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    first = [phases.index(phase) for phase in order]
    assert first == sorted(first)


def test_categories_add_up_to_what_the_model_owns() -> None:
    model, step = accumulation()
    traced = trace(model, step)
    owned = sum(p.numel() * p.element_size() for p in model.parameters())
    by_category = {c: sum(s.bytes for s in traced.storages if s.category is c and s.resident) for c in Category}
    assert by_category[Category.PARAMETER] == owned
    assert by_category[Category.OPTIMIZER] >= 2 * owned
    gradients = [s for s in traced.storages if s.category is Category.GRADIENT and not s.resident]
    assert sum(s.bytes for s in gradients) >= owned


def test_dropout_is_noted_as_random() -> None:
    model, step = no_optimizer()
    random = {op.name for op in trace(model, step).ops if op.random}
    assert random == {"aten.native_dropout.default"} or random == {"aten.bernoulli_.float"}


def test_ops_name_the_users_line() -> None:
    model, step = no_optimizer()
    lines = {op.source for op in trace(model, step).ops if op.name.startswith("aten.gelu") and op.phase is Phase.FORWARD}
    assert len(lines) == 1
    assert Path(lines.pop().rpartition(":")[0]).name == "_steps.py"


def test_saved_tensors_are_used_in_backward_and_released_after() -> None:
    model, step = no_optimizer()
    traced = trace(model, step)
    backward = [index for index, op in enumerate(traced.ops) if op.phase is Phase.BACKWARD]
    assert traced.saved
    for saved in traced.saved:
        assert saved.used is not None
        assert saved.position <= backward[0] <= saved.used <= saved.released <= backward[-1] + 1
        assert saved.node.endswith("Backward0")


def test_natural_life_of_an_activation_ends_in_forward() -> None:
    model, step = no_optimizer()
    traced = trace(model, step)
    first_backward = next(index for index, op in enumerate(traced.ops) if op.phase is Phase.BACKWARD)
    gelu_outputs = {s.storage for s in traced.saved if s.node == "GeluBackward0"}
    assert gelu_outputs
    assert all(traced.storages[index].freed < first_backward for index in gelu_outputs)


def test_trace_leaves_no_hook_and_no_tensor_behind() -> None:
    model, step = no_optimizer()
    step()
    trace(model, step)
    gc.collect()
    before = sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
    trace(model, step)
    gc.collect()
    assert sum(1 for o in gc.get_objects() if issubclass(type(o), torch.Tensor)) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_trace_restores_parameters_optimizer_and_random_state() -> None:
    model, step = accumulation()
    parameters = [p.detach().clone() for p in model.parameters()]
    state = torch.get_rng_state()
    trace(model, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), parameters, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_without_backward_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(StepError, match="never called backward"):
        trace(model, lambda: model(torch.ones(1, 2)))


def test_an_error_of_the_step_passes_through_and_leaves_nothing_installed() -> None:
    model = nn.Sequential(nn.Linear(2, 2))

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        record_step(model, step)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.autograd.graph.saved_tensors_hooks is not None
    assert model(torch.ones(1, 2)).grad_fn is not None


def test_ops_of_a_bundled_workload_name_its_file() -> None:
    model, step = gpt()
    files = {Path(op.source.rpartition(":")[0]).name for op in trace(model, step).ops if op.phase is Phase.FORWARD}
    assert "gpt.py" in files
    assert files <= {"gpt.py", "text.py", "_steps.py"}


def test_calls_of_functions_are_those_that_ran_an_op_in_forward() -> None:
    model, step = gpt()
    traced = trace(model, step)
    block = next(i for i, call in enumerate(traced.calls) if call.path == "blocks.1")
    inside = [f for f in traced.functions if traced.calls[f.call].path.startswith("blocks.1")]
    linears = [f for f in inside if f.function == "torch._C._nn.linear"]
    assert linears
    for call in linears:
        names = [op.name for op in traced.ops[call.start : call.end]]
        assert any(name in ("aten.addmm.default", "aten.mm.default") for name in names)
        assert all(call.start <= traced.storages[s].born < call.end for s in call.outputs)
    assert all(traced.calls[block].start <= f.start < f.end <= traced.calls[block].end for f in inside)
    assert all(a.end <= b.start for a, b in zip(traced.functions, traced.functions[1:], strict=False))
    assert all(op.phase is Phase.FORWARD for f in traced.functions for op in traced.ops[f.start : f.end])
