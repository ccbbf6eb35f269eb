"""What a trace says of ops of backward, of replays, of bytes that ops make, and of what autograd saved."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.records import Phase, StepTrace
from lowtide.trace import record_step, trace

sys.path.insert(0, str(Path(__file__).parent))
from _steps import gpt, no_optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        hidden = torch.tanh(hidden)
        return self.down(hidden)


def traced_net() -> StepTrace:
    model, x = Net(), torch.randn(4, 8)
    return trace(model, lambda: model(x).square().mean().backward())


def test_an_op_of_backward_has_line_and_call_of_the_op_that_made_its_node() -> None:
    traced = traced_net()
    lines, start = inspect.getsourcelines(Net.forward)
    line = start + next(i for i, text in enumerate(lines) if "tanh" in text)
    [backward] = [op for op in traced.ops if op.name == "aten.tanh_backward.default"]
    assert backward.origin is not None
    assert traced.ops[backward.origin].name == "aten.tanh.default"
    assert backward.source == traced.ops[backward.origin].source == f"{__file__}:{line}"
    assert backward.call is not None
    assert traced.calls[backward.call].path == ""


@pytest.mark.parametrize("name", ["<stdin>", "<ipython-input-7-0c5f3e>"])
def test_lines_that_were_typed_at_a_prompt_are_the_users(name: str) -> None:
    typed = "def forward(x):\n    return torch.tanh(x)\n"
    space = {"torch": torch}
    exec(compile(typed, name, "exec"), space)
    weight = nn.Parameter(torch.ones(2))
    model = nn.ParameterList([weight])
    traced = trace(model, lambda: space["forward"](weight).sum().backward())
    assert [op.source for op in traced.ops if op.name == "aten.tanh.default"] == [f"{name}:2"]


def test_gradients_of_a_layer_are_attributed_to_its_call() -> None:
    traced = traced_net()
    products = [op for op in traced.ops if op.name == "aten.mm.default" and op.phase is Phase.BACKWARD]
    assert [traced.calls[op.call].path for op in products if op.call is not None] == ["down", "down", "up"]


def test_nearly_all_of_backward_is_attributed() -> None:
    model, step = gpt()
    backward = [op for op in trace(model, step).ops if op.phase is Phase.BACKWARD]
    # What is not: autograd adding up gradients, and putting them into the parameters.
    assert {op.name for op in backward if op.origin is None} <= {"aten.detach.default", "aten.add.Tensor", "aten.new_empty_strided.default"}
    assert sum(op.origin is not None for op in backward) > 0.7 * len(backward)


def test_bytes_born_are_those_of_the_storages_that_an_op_made() -> None:
    for make in (gpt, no_optimizer):
        traced = trace(*make())
        born = [0] * len(traced.ops)
        for storage in traced.storages:
            if not storage.resident:
                born[storage.born] += storage.bytes
        assert [op.born_bytes for op in traced.ops if op.born_bytes] != []
        in_place = {i for i, op in enumerate(traced.ops) if op.born_bytes != born[i]}
        assert not in_place


def test_saved_tensors_have_dtype_and_shape() -> None:
    traced = traced_net()
    [saved] = [s for s in traced.saved if s.node == "TanhBackward0"]
    assert (saved.dtype, saved.shape, saved.bytes) == ("float32", (4, 32), 4 * 32 * 4)


def test_replays_of_this_library_and_of_another_are_told_from_backward() -> None:
    x = torch.randn(4, 8)
    for run in (lambda model: lowtide.checkpoint(model)(x), lambda model: checkpoint(model, x, use_reentrant=False)):
        model = Net()

        def step(run=run, model=model) -> None:  # type: ignore[no-untyped-def]
            run(model).square().mean().backward()

        step()
        replayed = [op.name for op in record_step(model, step).ops if op.phase is Phase.REPLAY]
        assert "aten.addmm.default" in replayed
        assert "aten.tanh.default" in replayed


def test_collectives_are_flagged(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = Net(), torch.randn(4, 8)

        def step() -> None:
            model(x).square().mean().backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)

        collectives = [op for op in trace(model, step).ops if op.collective]
    finally:
        dist.destroy_process_group()
    assert [op.name for op in collectives] == ["c10d.allreduce_.default"] * 4
    assert all(op.reads for op in collectives)
