"""Where regions end: after some of their saved tensors, and runs of one block in the first module of what follows."""

from __future__ import annotations

import gc
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.measure import peak_bytes
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.plan._candidate import Candidate
from lowtide.plan._candidates import SEGMENTS, candidates
from lowtide.plan._cuts import _FEW_CALLS, _MOST, _hull, first_saved
from lowtide.plan._equal import EqualBlocks
from lowtide.plan._index import TraceIndex
from lowtide.plan._replay import replays_of, slots_of
from lowtide.plan._runs import runs

SIZE = 16


class Block(nn.Module):
    """Elementwise ops, then products: what is saved first is cheap to make again."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(SIZE), Mix()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.norm(x))


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, SIZE, SIZE) / SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = F.gelu((x * 2).sin() @ weight).tanh()
        return x


class Subject:
    def __init__(self, blocks: int) -> None:
        torch.manual_seed(0)
        self.model, self.x = nn.Sequential(*(Block() for _ in range(blocks))), torch.randn(64, SIZE)
        self.step()
        self.trace = lowtide.trace(self.model, self.step)
        self.index = TraceIndex(self.trace)

    def step(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.model(self.x).square().sum().backward()

    def more_than_simulated(self, regions: list[PlannedRegion]) -> int:
        gc.collect()
        return peak_bytes(self.step, torch.device("cpu"), self.trace.resident_bytes) - simulate(self.trace, regions).peak_bytes

    def gradients(self) -> list[torch.Tensor]:
        self.step()
        return [p.grad.clone() for p in self.model.parameters()]


def hull_by_sides(ends: list[tuple[int, float, int]], fixed_s: float) -> list[tuple[int, float, int]]:
    """Those with no other, nor the line between two others, that frees as much in less time; the start, where nothing is freed, counts."""
    points = [(0, -fixed_s, 0), *ends]
    found = []
    for freed, seconds, number in sorted(ends):
        left = [p for p in points if p[0] < freed]
        right = [p for p in points if p[0] > freed]
        above = [p for p in points if p[0] >= freed and p[1] <= seconds and p[2] != number]
        lines = any(a[1] + (b[1] - a[1]) * (freed - a[0]) / (b[0] - a[0]) <= seconds for a in left for b in right)
        if not above and not lines:
            found.append((freed, seconds, number))
    return found


@pytest.mark.parametrize("seed", range(30))
def test_ends_are_on_the_hull_of_bytes_against_seconds(seed: int) -> None:
    draw = random.Random(seed)
    ends = [(draw.randrange(1, 10**6), draw.uniform(0, 1e-3), number) for number in range(1, draw.randrange(2, 12))]
    assert _hull(ends, 2e-5) == hull_by_sides(ends, 2e-5)[:_MOST]


def test_of_larger_models_few_ends_are_offered_and_none_that_another_is_better_than() -> None:
    subject = Subject(_FEW_CALLS // 3 + 1)
    index = subject.index
    assert index.module_calls > _FEW_CALLS
    base = replays_of(index, ("0",))
    all_ends = range(1, len(slots_of(index, base[0].calls)))
    found = first_saved(index, base)
    assert 0 < len(found) <= _MOST < len(all_ends)
    at = {n: Candidate(("0",), (), tuple(replays_of(index, ("0",), (), n)), first_saved=n) for n in all_ends}
    for number in found:
        one = at[number]
        assert one.freed_bytes
        assert not any(other.freed_bytes > one.freed_bytes and other.seconds <= one.seconds for other in at.values())
    offered = {c.first_saved for c in candidates(index).regions if c.paths == ("0",) and not c.kept}
    assert offered - {None} <= set(found)
    assert offered - {None}


def test_of_small_models_every_end_is_considered() -> None:
    index = Subject(2).index
    base = replays_of(index, ("0",))
    assert first_saved(index, base) == [*range(1, len(slots_of(index, base[0].calls)))]


def test_a_run_of_one_block_may_end_in_the_first_module_of_the_next_and_goes_no_further() -> None:
    index = Subject(3).index
    found, complete = runs(index, EqualBlocks(index), SEGMENTS[-1])
    assert complete
    assert {paths for paths in found if ":" not in "".join(paths)} == {
        ("0.norm", "0.mix"),
        ("1.norm", "1.mix"),
        ("2.norm", "2.mix"),
        *[("0", "1"), ("1", "2"), ("0", "1", "2")],
        *[("0", "1.norm"), ("1", "2.norm")],
    }


def test_a_run_that_ends_in_the_first_module_of_the_next_block_has_right_gradients_and_the_simulated_peak() -> None:
    subject = Subject(3)
    paths, plain = ("0", "1.norm"), subject.gradients()
    more, least = [subject.more_than_simulated([])], simulate(subject.trace, None).peak_bytes
    slots = len(slots_of(subject.index, replays_of(subject.index, paths)[0].calls))
    for count in (*range(slots // 2, slots, 2), None):
        region = PlannedRegion(paths, first_saved=count)
        handle = lowtide.apply(subject.model, Plan((region,), subject.trace.fingerprint, 0, 0, 0.0, 0.0, "by hand"))
        for _ in range(3):
            assert all(map(torch.equal, subject.gradients(), plain))
        more.append(subject.more_than_simulated([region]))
        handle.remove()
        least, before = simulate(subject.trace, [region]).peak_bytes, least
        assert least < before
    assert set(more) == {more[0]}
