"""What looks at a compiled step sees what it does, and leaves it compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import _torch_compiler as torch_compiler

from ._models import Transformer, stack

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]


class Compiled:
    """A compiled model, its step, and how often compiled code ran."""

    def __init__(self) -> None:
        self.runs = 0
        self.model = stack(Transformer, 2)
        compiled, x = torch.compile(self.model, backend=self._compile), torch.randn(256, 16)
        self.step = lambda: compiled(x).square().sum().backward()

    def _compile(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        inner = aot_eager(graph, inputs)

        def run(*args: Any) -> Any:
            self.runs += 1
            return inner(*args)

        return run

    def runs_of(self, count: int) -> int:
        before = self.runs
        for _ in range(count):
            self.step()
        return self.runs - before


TOOLS: dict[str, Callable[[nn.Module, Callable[[], object]], object]] = {
    "trace": lowtide.trace,
    "fake trace": lambda model, step: lowtide.trace(model, step, fake=True),
    "measure": lowtide.measure,
    "audit": lambda model, step: lowtide.audit(model, step, policy="full"),
    "fit": lambda model, step: lowtide.fit(model, step, budget="100%", rounds=1),
}


@pytest.mark.parametrize("compiled_before", [True, False])
@pytest.mark.parametrize("tool", TOOLS.values(), ids=list(TOOLS))
def test_a_step_stays_compiled(tool, compiled_before):
    subject = Compiled()
    if compiled_before:
        assert subject.runs_of(1) == 1
    tool(subject.model, subject.step)
    assert subject.runs_of(2) == 2


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_a_compiled_step_is_verified_as_it_runs(policy):
    subject = Compiled()
    found = lowtide.verify(subject.model, subject.step, policy=policy, steps=2)
    assert found.equal, found.report()
    assert subject.runs > 0
    assert subject.runs_of(2) == 2


def test_fit_measures_the_compiled_step():
    subject = Compiled()
    before = subject.runs
    result = lowtide.fit(subject.model, subject.step, budget="80%", rounds=1)
    assert result.verified
    assert result.peak_bytes <= result.budget_bytes
    assert subject.runs > before
    assert subject.runs_of(1) == 1


def test_threads_that_watch_at_the_same_time_leave_the_compiler_on():
    subject = Compiled()
    assert subject.runs_of(1) == 1
    one, other = torch_compiler.off(), torch_compiler.off()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert subject.runs_of(1) == 0
    other.__exit__(None, None, None)
    assert subject.runs_of(1) == 1
