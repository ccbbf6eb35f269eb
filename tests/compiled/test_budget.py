"""Byte budgets in the compiler's partitioner: measured peaks, equal gradients, and errors that say what to do."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compiled import _costs
from lowtide.measure import live_storages, peak_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),
]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def op_times_that_are_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_costs, "seconds", lambda run, device: 1e-3)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.dropout(torch.tanh(self.norm(self.up(x))), 0.2, self.training))


class Net(nn.Module):
    """Not an ``nn.Sequential``, whose forward the compiler does not take into a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Setting:
    """Four blocks and their step, into gradients that are there already."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.x = torch.randn(1024, 32)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> torch.Tensor:
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        loss = self.model(self.x).square().mean()
        loss.backward()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor]:
        for block in self.model.blocks:
            block.norm.reset_running_stats()
        torch.manual_seed(1)
        self.step()
        return [*(p.grad.clone() for p in self.model.parameters()), *(b.clone() for b in self.model.buffers())]

    def peak(self) -> int:
        own = [self.x, *self.model.buffers(), *self.model.parameters(), *(p.grad for p in self.model.parameters())]
        return peak_bytes(self.step, CPU, sum(tensor.nbytes for tensor in own))


def compiled_plainly(whole: bool) -> list[torch.Tensor]:
    setting = Setting()
    for module in [setting.model] if whole else setting.model.blocks:
        module.compile()
    found = setting.gradients()
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_the_measured_peak_is_within_the_budget_and_gradients_are_those_without_one(whole):
    expected, setting = compiled_plainly(whole), Setting()
    options = lowtide.compile_options("100%")
    for module in [setting.model] if whole else setting.model.blocks:
        module.compile(options=options)
    peaks, plain = [], 0
    for budget in ("80%", "65%"):
        buffers = [buffer.clone() for buffer in setting.model.buffers()]
        result = lowtide.fit_compiled(setting.model, setting.step, options, budget)
        plain = result.plain_peak_bytes
        assert result.graphs == (1 if whole else 4)
        assert all(torch.equal(one, other) for one, other in zip(buffers, setting.model.buffers(), strict=True))
        assert setting.peak() <= result.budget_bytes <= plain
        peaks.append(result.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < 0.65 * plain
    for one, other in zip(setting.gradients(), expected, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(lowtide.InfeasibleBudgetError, match="smallest that was measured") as error:
        lowtide.fit_compiled(setting.model, setting.step, options, 400_000)
    assert 400_000 < error.value.smallest_bytes <= peaks[-1]


@pytest.mark.parametrize(("budget", "share"), [("80%", 0.8), ("80% of activations", None)])
def test_what_others_have_alive_in_the_process_is_no_part_of_a_share(budget, share):
    others, setting = torch.ones(5_000_000), Setting()
    setting.model.compile()
    setting.step()
    plain = setting.peak()
    torch._dynamo.reset()
    options = lowtide.compile_options("100%")
    setting.model.compile(options=options)
    result = lowtide.fit_compiled(setting.model, setting.step, options, budget)
    own = lowtide.trace(setting.model, setting.step).resident_bytes
    assert result.plain_peak_bytes == plain < others.nbytes
    assert result.budget_bytes == (int(plain * share) if share else own + int((plain - own) * 0.8))
    assert setting.peak() == result.peak_bytes <= result.budget_bytes


def test_without_a_fit_a_whole_model_is_split_by_its_timeline_or_the_floor_is_said():
    setting = Setting()
    resident = sum(live_storages(setting.model, CPU).values())
    setting.model.compile(options=lowtide.compile_options(resident + 1))
    with pytest.raises(Exception, match=r"allow at least \d+ bytes more") as error:
        setting.step()
    more = int(re.search(r"allow at least (\d+) bytes", str(error.value))[1])
    torch._dynamo.reset()
    setting.model.compile(options=lowtide.compile_options(resident + 1 + int(1.05 * more)))
    setting.step()
    lean = setting.peak()
    torch._dynamo.reset()
    setting.model.compile()
    setting.step()
    assert lean < setting.peak()


def test_several_modules_without_a_fit_are_lean_and_told():
    setting = Setting()
    options = lowtide.compile_options("1GiB")
    for block in setting.model.blocks:
        block.compile(options=options)
    with pytest.warns(UserWarning, match="until lowtide.fit_compiled"):
        setting.step()
    lean = setting.peak()
    torch._dynamo.reset()
    for block in setting.model.blocks:
        block.compile()
    setting.step()
    assert lean < setting.peak()


def test_errors_say_what_to_do():
    with pytest.raises(lowtide.BudgetError, match="cannot read the budget"):
        lowtide.compile_options("much")
    setting, options = Setting(), lowtide.compile_options("1GiB")
    setting.model.compile(backend="aot_eager")
    with pytest.raises(lowtide.StepError, match="with the inductor backend"):
        lowtide.fit_compiled(setting.model, setting.step, options)
    with pytest.raises(lowtide.InvalidInputError, match="found dict"):
        lowtide.fit_compiled(setting.model, setting.step, {})
    setting.model.compile(options=lowtide.compile_options("50%"))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="needs a measured step"):
        setting.step()
