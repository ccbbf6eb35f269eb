"""The trace of a process, rewritten for one of several ranks: what is shared, what is added, and where that is alive."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import lowtide
from lowtide.distributed import GatherCost, on_ranks
from lowtide.errors import InvalidInputError
from lowtide.plan import PlannedRegion
from lowtide.plan._overhead import ENGINE
from lowtide.records import Category

WIDTH, BLOCKS, ROWS = 32, 3, 64
BLOCK = 4 * (WIDTH * WIDTH + WIDTH)
ALL = BLOCKS * BLOCK
UNITS = [f"{block}" for block in range(BLOCKS)]


class Block(nn.Sequential):
    """A layer and what it saves."""


@pytest.fixture(scope="module")
def traced() -> lowtide.StepTrace:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    return lowtide.trace(model, step)


def _bytes(trace: lowtide.StepTrace, category: Category, *, resident: bool) -> int:
    return sum(s.bytes for s in trace.storages if s.category is category and s.resident == resident)


def test_replicas_have_a_bucket_for_every_gradient(traced):
    replicated = on_ranks(traced, 2, 0)
    assert lowtide.simulate(replicated, None).peak_bytes == lowtide.simulate(traced, None).peak_bytes + ALL


def test_optimizer_state_is_dealt_out_whole(traced):
    """Three matrices and three vectors on two ranks: two of one of them, one of the other."""
    steps = sum(s.bytes for s in traced.storages if s.category is Category.OPTIMIZER and s.bytes == 4)
    state = [_bytes(on_ranks(traced, 2, 1, rank=rank), Category.OPTIMIZER, resident=True) for rank in range(2)]
    assert sum(state) - 2 * steps == _bytes(traced, Category.OPTIMIZER, resident=True) - steps
    assert state[0] - steps in (2 * (2 * 4 * WIDTH * WIDTH + n * 4 * WIDTH) for n in range(4))


@pytest.mark.parametrize("zero", [2, 3])
def test_what_is_sharded_is_whole_only_where_it_is_used(traced, zero):
    sharded = on_ranks(traced, 4, zero, UNITS)
    assert _bytes(sharded, Category.PARAMETER, resident=True) == ALL // 4
    assert _bytes(sharded, Category.OPTIMIZER, resident=True) <= _bytes(traced, Category.OPTIMIZER, resident=True) // 4 + 8 * BLOCKS
    whole = [s for s in sharded.storages if s.category is Category.PARAMETER and s.bytes == BLOCK]
    assert len(whole) == BLOCKS * (zero - 1)
    shares = [s for s in sharded.storages[len(traced.storages) :] if s.category is Category.GRADIENT]
    assert sum(s.bytes for s in shares) == ALL // 4


def test_less_is_held_at_every_stage_and_a_plan_counts_there_too(traced):
    traces = [on_ranks(traced, 4, zero, UNITS) for zero in range(4)]
    peaks = [lowtide.simulate(trace, None).peak_bytes for trace in traces]
    assert peaks == sorted(peaks, reverse=True)
    regions = [PlannedRegion((unit,)) for unit in UNITS]
    saved = [lowtide.simulate(trace, None).peak_bytes - lowtide.simulate(trace, regions).peak_bytes for trace in traces]
    assert min(saved) > 0


def test_one_rank_has_what_a_process_alone_has(traced):
    assert on_ranks(traced, 1, 3, UNITS) is traced


def test_a_unit_that_is_never_called_is_an_error(traced):
    with pytest.raises(InvalidInputError, match=r"never goes through 'blocks\.7', which is to be sharded"):
        on_ranks(traced, 2, 3, ["blocks.7"])
    with pytest.raises(InvalidInputError, match="zero is 0 to 3"):
        on_ranks(traced, 2, 4)


@pytest.fixture(scope="module")
def pairs() -> lowtide.StepTrace:
    """Three modules of two blocks each; every op takes as long as any other."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(*(Block(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2))) for _ in range(3)))
    x = torch.randn(ROWS, WIDTH)
    found = lowtide.trace(model, lambda: model(x).square().mean().backward())
    return dataclasses.replace(found, ops=tuple(dataclasses.replace(op, seconds=1e-3) for op in found.ops))


PAIRED = [f"{pair}.{block}" for pair in range(3) for block in range(2)]


@pytest.mark.parametrize("solver", ["constrained-path", "mixed-integer"])
def test_a_slow_gather_makes_another_plan_the_fastest(pairs, solver):
    settings = {"units": PAIRED, "forward_only": PAIRED[::2]}  # of each pair the first is gathered for a replay of both alone
    free, slow = (on_ranks(pairs, 4, 3, **settings, gather=cost) for cost in (None, GatherCost.of_bandwidth(1e3)))
    budget = int(0.8 * lowtide.simulate(free, None).peak_bytes)
    chosen, cheaper = (lowtide.solve(trace, budget, solver=solver) for trace in (free, slow))
    assert lowtide.simulate(slow, chosen).gathers > lowtide.simulate(slow, cheaper).gathers == 0
    assert lowtide.simulate(slow, chosen).added_s > lowtide.simulate(slow, cheaper).added_s
    assert lowtide.simulate(free, chosen).added_s < lowtide.simulate(free, cheaper).added_s
    assert max(lowtide.simulate(slow, plan).peak_bytes for plan in (chosen, cheaper)) <= budget


def test_what_is_gathered_for_a_replay_stays_whole_until_backward_has_it(pairs):
    sharded = on_ranks(pairs, 4, 3, PAIRED)
    first = lowtide.simulate(sharded, [PlannedRegion(("0",))])
    parameters = list(Category).index(Category.PARAMETER)
    of_replay = [moment for moment in first.moments if moment.phase == "replay"]
    shares = _bytes(sharded, Category.PARAMETER, resident=True)
    assert [moment.live_bytes[parameters] for moment in of_replay] == [shares + 2 * BLOCK] * len(of_replay)
    after = first.moments[first.moments.index(of_replay[-1]) + 1]
    assert after.live_bytes[parameters] == shares + 2 * BLOCK


def test_what_is_gathered_apart_is_replayed_apart(pairs):
    for zero in (2, 3):
        sharded = on_ranks(pairs, 4, zero, PAIRED)
        together = lowtide.simulate(sharded, [PlannedRegion(tuple(PAIRED[:2]))])
        apart = lowtide.simulate(sharded, [PlannedRegion((unit,)) for unit in PAIRED[:2]])
        assert (together.peak_bytes, together.added_s) == (apart.peak_bytes, apart.added_s)
    on_one = lowtide.simulate(pairs, [PlannedRegion(tuple(PAIRED[:2]))])
    # There it is one region of two members, which makes what goes from one to the other again.
    more = ENGINE.member_s - ENGINE.region_s + ENGINE.op_s + ENGINE.slot_s
    assert on_one.overhead_s == pytest.approx(apart.overhead_s + more)
