"""What is compiled of the tracer traces what its twins in Python trace, leaves no references behind, and refuses what it cannot take."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.records import Op, StepTrace
from lowtide.trace import trace

sys.path.insert(0, str(Path(__file__).parent))
from _steps import STEPS, Made, residual_net

native = sys.modules["lowtide.trace._acceleration"].native
pytestmark = pytest.mark.skipif(native is None, reason="the tracer was not compiled here, or LOWTIDE_NATIVE=0 says so")
USERS = [sys.modules[f"lowtide.trace.{name}"] for name in ("_acceleration", "_recorder", "_saved", "_storages")]


@contextmanager
def in_python() -> Iterator[None]:
    """As where nothing was compiled."""
    for module in USERS:
        module.native = None
    try:
        yield
    finally:
        for module in USERS:
            module.native = native


def without_times(traced: StepTrace) -> StepTrace:
    return replace(traced, ops=tuple(replace(op, seconds=0.0) for op in traced.ops))


def both(make: Callable[[], Made], **options: Any) -> tuple[StepTrace, StepTrace]:
    torch.manual_seed(0)
    model, step = make()
    step()
    compiled = trace(model, step, **options)
    with in_python():
        return without_times(compiled), without_times(trace(model, step, **options))


class Odd(nn.Module):
    """Ops of every kind that is told from others: views, writes, values that decide, lists, several results, an error on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.held: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.linear(self.norm(x)))
        self.held = y.detach()
        y = torch.cat([y, *y.split(4)]) + torch.stack(list(y.unbind(1)), 1).repeat(2, 1)
        y = y + y.max(1, keepdim=True).values
        with suppress(RuntimeError):
            torch.mm(y, y)
        rows = (x[:, 0] > 0).nonzero().squeeze(-1)
        return y[rows] + torch.empty_strided((1, 8), (1, 1)).fill_(1.5) + torch.full((8,), True)


def odd() -> Made:
    model, x = Odd(), torch.randn(16, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model(x)

    return model, step


def checkpointed() -> Made:
    model, x = residual_net()
    regions = [lowtide.checkpoint(block) for block in model[:2]]

    def step() -> None:
        model.zero_grad()
        y = x.clone().requires_grad_()
        for region in regions:
            y = region(y)
        for block in model[2:]:
            y = checkpoint(block, y, use_reentrant=False)
        y.square().mean().backward()

    return model, step


@pytest.mark.parametrize("make", [*STEPS.values(), odd, checkpointed], ids=lambda make: make.__name__)
def test_traces_are_alike(make: Callable[[], Made]) -> None:
    compiled, of_python = both(make)
    assert compiled == of_python
    assert len(compiled.ops) > 10


def test_traces_with_saved_tensors_kept_away_are_alike() -> None:
    compiled, of_python = both(STEPS["no_optimizer"], offload=True)
    assert compiled == of_python
    assert compiled.saved


def test_it_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native is not None
    recorder = sys.modules["lowtide.trace._recorder"].Recorder

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("the twin ran")

    monkeypatch.setattr(recorder, "__torch_dispatch__", refused)
    model, step = STEPS["no_optimizer"]()
    assert trace(model, step).ops
    with in_python(), pytest.raises(AssertionError):
        trace(model, step)


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    model, step = STEPS["no_optimizer"]()

    def raises() -> None:
        step()
        torch.ones(2) @ torch.ones(3)

    step()
    with pytest.raises(RuntimeError):
        lowtide.trace(model, raises)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(RuntimeError):
            lowtide.trace(model, raises)
        step()
        found = [each for each in gc.get_objects() if type(each).__module__ == "lowtide.trace._native" or type(each) is Op]
    finally:
        gc.enable()
    assert found == []


def test_records_are_what_their_class_makes() -> None:
    assert native is not None
    columns = [["a", "b"], ("phase", "phase"), [0, None], ["", "f:1"], [0.5, 1.5], [1, 2], [True, False], [(), (1,)], [(2,), ()]]
    columns += [[3, 4], [False, True], [None, 0]]
    made = native.records_of(Op, *columns)
    assert made == tuple(map(Op, *columns))
    assert [hash(op) for op in made] == [hash(op) for op in map(Op, *columns)]
    with pytest.raises(AttributeError):
        made[0].name = "c"


@dataclass
class NoSlots:
    field: int


@pytest.mark.parametrize(
    "call",
    [
        lambda n: n.records_of(Op, [1]),
        lambda n: n.records_of(NoSlots, [1]),
        lambda n: n.records_of(NoSlots, iter([1])),
        lambda n: n.records_of(Op),
        lambda n: n.configure([]),
        lambda n: n.Storages(),
        lambda n: n.Recording(storages=None),
        lambda n: n.Saving(None),
    ],
)
def test_what_it_cannot_take_is_an_error(call: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError):
        call(native)


def test_parts_of_the_wrong_type_are_an_error() -> None:
    assert native is not None
    names = ("row_of", "sizes", "categories", "born", "freed", "resident", "watches", "at_start", "empty_at_start", "running", "ops")
    functions = dict.fromkeys(("size", "entered", "other", "note_replaced"))
    parts: dict[str, Any] = {**{name: [] for name in names}, "row_of": {}, "at_start": {}, "empty_at_start": set(), **functions}
    storages = native.Storages(**parts)
    assert storages.rows_of([], None) == ()
    for name in names:
        with pytest.raises(TypeError):
            native.Storages(**{**parts, name: 3})
    with pytest.raises(TypeError):
        storages.rows_of(torch.ones(1), None)
    storages.close()
    with pytest.raises(RuntimeError, match="closed"):
        storages.rows_of([], None)


def test_a_mode_is_given_an_operator_types_and_arguments() -> None:
    made: list[Any] = []
    recorder = sys.modules["lowtide.trace._recorder"]
    there = recorder.MethodType

    def method(function: Any, mode: Any) -> MethodType:
        made.append(function)
        return there(function, mode)

    recorder.MethodType = method
    try:
        trace(*STEPS["no_optimizer"]())
    finally:
        recorder.MethodType = there
    for arguments in ((), (None, 1, (), 3), (None, 1, (), (), 3)):
        with pytest.raises(TypeError):
            made[0](*arguments)
