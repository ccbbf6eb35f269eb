"""Peaks against formulas, and times taken in turns."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.measure import Times, _timing, free_bytes, peak_bytes, ratio, time_in_turns
from lowtide.measure._phase_peaks import live_storages

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_what_is_alive_at_once() -> None:
    def step() -> None:
        first = torch.empty(MIB, dtype=torch.uint8)
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first
        third = torch.empty(MIB, dtype=torch.uint8)
        del second, third

    assert peak_bytes(step, CPU, resident_bytes=0) == 3 * MIB
    assert peak_bytes(step, CPU, resident_bytes=5 * MIB) == 8 * MIB


def test_what_a_step_frees_from_the_step_before_makes_room() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.clear()
        kept.append(torch.empty(4 * MIB, dtype=torch.uint8))

    assert peak_bytes(step, CPU, resident_bytes=4 * MIB) == 4 * MIB


def test_steps_run_in_turns_and_the_first_round_does_not_count() -> None:
    order: list[str] = []
    times = time_in_turns([lambda: order.append("a"), lambda: order.append("b")], 3, CPU)
    assert order == ["a", "b"] * 4
    assert [len(t.seconds) for t in times] == [3, 3]


def test_a_slower_step_has_the_larger_ratio(monkeypatch) -> None:
    now = itertools.accumulate([0.0] + [3.0, 100.0, 2.0, 100.0] * 4)  # after each step: its time, and what passes up to the next
    monkeypatch.setattr(_timing, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    slow, fast = time_in_turns([lambda: None] * 2, 3, CPU)
    assert (slow.seconds, fast.seconds) == ((3.0,) * 3, (2.0,) * 3)
    assert ratio(slow, fast) == 1.5


def test_the_ratio_pairs_runs_so_that_drift_cancels() -> None:
    assert ratio(Times((2.0, 4.0, 20.0)), Times((1.0, 2.0, 10.0))) == 2.0


def test_median_and_spread() -> None:
    times = Times((1.0, 2.0, 3.0, 4.0, 100.0))
    assert times.median_s == 3.0
    assert times.spread_s == pytest.approx(50.5)
    assert Times((1.0, 2.0)).spread_s == 0.0
    assert times.replay_s == 0.0


def test_a_run_that_was_held_up_in_a_replay_does_not_make_replays_longer_than_steps() -> None:
    assert Times((2.0, 3.0, 100.0), (1.0, 1.5, 99.0)).replay_s == 1.5


def test_the_machine_has_memory_left() -> None:
    assert free_bytes(CPU) > MIB


def test_fake_tensors_hold_no_bytes() -> None:
    model = torch.nn.Linear(2, 2)
    before = live_storages(model, CPU)
    with FakeTensorMode():
        fake = torch.empty(MIB)
    real = torch.empty(7, dtype=torch.uint8)
    assert fake.device == CPU
    assert sum(live_storages(model, CPU).values()) - sum(before.values()) == real.nbytes


def test_another_clock_may_be_told():
    now = iter(float(n) for n in range(100))
    [times] = time_in_turns([lambda: None], 3, CPU, clock=lambda: next(now))
    assert times.seconds == (1.0, 1.0, 1.0)
