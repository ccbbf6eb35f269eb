"""``lowtide.measure``: what it reports of a step, phase by phase, and of two steps in turns."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import lowtide
from lowtide.engine import install
from lowtide.errors import InvalidInputError
from lowtide.measure import _timing
from lowtide.measure._phase_peaks import _highest, live_storages, phase_peaks
from lowtide.measure._timing import Times
from lowtide.plan import simulate
from lowtide.trace import trace

MIB = 2**20
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def made(blocks: int = 3):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(256, 32)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def test_a_step_is_measured_whole() -> None:
    model, step = made()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = lowtide.measure(model, step, tokens=256, steps=3)
    assert isinstance(found, lowtide.Measurement)
    assert found.steps == 3
    assert found.tokens_per_s == pytest.approx(256 / found.step_s)
    assert found.replay_s == found.replay_share == 0.0
    assert [phase for phase, _ in found.phase_peaks] == ["forward", "backward", "optimizer"]
    assert max(size for _, size in found.phase_peaks) == found.peak_bytes > found.live_bytes
    assert found.reserved_bytes is None
    assert found.resident_set_bytes > found.peak_bytes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_peak_is_that_of_the_trace() -> None:
    model, step = made()
    traced = trace(model, step)
    resident = sum(s.bytes for s in traced.storages if s.resident)
    before = sum(live_storages(model, CPU).values())
    found = lowtide.measure(model, step, steps=1)
    assert found.live_bytes == pytest.approx(before + 2 * sum(p.nbytes for p in model.parameters()), rel=0.01)  # and AdamW's state
    assert found.peak_bytes - found.live_bytes == pytest.approx(simulate(traced, None).peak_bytes - resident, rel=0.005)


def test_each_phase_has_the_peak_of_its_own_moments() -> None:
    parameter = nn.Parameter(torch.ones(MIB // 4))

    class Grows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            torch.empty(3 * MIB, dtype=torch.uint8)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            torch.empty(7 * MIB, dtype=torch.uint8)
            return grad.expand(MIB // 4)

    class Updates(torch.optim.SGD):
        def step(self):
            torch.empty(5 * MIB, dtype=torch.uint8)

    optimizer = Updates([parameter], lr=0.1)

    def step() -> None:
        Grows.apply(parameter).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Module()
    model.weight = parameter
    found = phase_peaks(step, model, CPU)
    rise = {phase: size - found.live_bytes for phase, size in found.by_phase}
    assert rise["forward"] == pytest.approx(3 * MIB, abs=64)
    assert rise["backward"] == pytest.approx(7 * MIB, abs=1 * MIB + 64)
    assert rise["optimizer"] == pytest.approx(5 * MIB + MIB, abs=64)  # and the gradient


def test_replays_are_a_phase_and_a_share_of_the_time() -> None:
    model, step = made()
    handles = [install([(str(i), block)]) for i, block in enumerate(model)]
    found = lowtide.measure(model, step, steps=2)
    for handle in handles:
        handle.remove()
    assert "replay" in dict(found.phase_peaks)
    assert 0 < found.replay_share < 1


def test_two_steps_are_measured_in_turns(monkeypatch) -> None:
    model, step = made()
    order: list[str] = []

    def slow() -> None:
        order.append("slow")
        step()

    def plain() -> None:
        order.append("plain")
        step()

    spans = iter([3.0, 2.0] * 4)
    monkeypatch.setattr(_timing, "_time_once", lambda run, *_: (run(), next(spans))[1])
    found = lowtide.measure(model, slow, against=plain, steps=3)
    assert isinstance(found, lowtide.Comparison)
    assert order[2:10] == ["slow", "plain"] * 4  # after a first run of each: a round to warm up, and three
    assert found.time_ratio == 1.5
    assert found.peak_ratio == pytest.approx(1.0, abs=0.01)
    assert (found.step.step_s, found.against.step_s) == (3.0, 2.0)


def test_replayed_against_plain_has_a_lower_peak() -> None:
    model, step = made(blocks=6)
    handles = [install([(str(i), block)]) for i, block in enumerate(model)]

    def plain() -> None:
        from contextlib import ExitStack

        with ExitStack() as stack:
            for handle in handles:
                stack.enter_context(handle.disabled())
            step()

    found = lowtide.measure(model, step, against=plain, steps=2)
    assert found.peak_ratio < 0.8
    assert found.step.replay_s > found.against.replay_s == 0


def test_autograd_is_as_it_was_after_a_step_that_raises() -> None:
    backward = torch.autograd.backward
    model, step = made()
    calls = iter(range(100))

    def fails() -> None:
        step()
        if next(calls) == 4:
            raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        lowtide.measure(model, fails, steps=1)
    assert torch.autograd.backward is backward


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"tokens": 0}, {"tokens": -4}])
def test_counts_are_above_zero(arguments) -> None:
    model, step = made()
    with pytest.raises(InvalidInputError, match=next(iter(arguments))):
        lowtide.measure(model, step, **arguments)


def test_levels_go_to_the_innermost_phase() -> None:
    sizes = [(1, 10), (11, 5), (16, 20), (17, -20), (31, 1)]
    spans = [(10, 30, "backward"), (15, 20, "replay")]
    assert _highest(sizes, spans, 0) == {"forward": 16, "backward": 15, "replay": 35}


def test_a_run_that_the_clock_did_not_see_replayed_nothing() -> None:
    assert Times((0.0, 2.0, 2.0), (0.0, 1.0, 1.0)).replay_s == 1.0


def test_the_process_is_seen_to_grow() -> None:
    """In a process of its own: where the kernel keeps the peak of a process, what ran in it before must not hide this."""
    code = f"""
import torch
from lowtide.measure._resident import peak_resident_set_bytes
small = peak_resident_set_bytes(lambda: None)
print(peak_resident_set_bytes(lambda: torch.ones({512 * MIB}, dtype=torch.uint8)) - small)
"""
    grown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert int(grown) > 256 * MIB
