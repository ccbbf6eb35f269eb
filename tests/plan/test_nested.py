"""Regions with regions inside, as the default solver offers them."""

from __future__ import annotations

import pytest

from lowtide.plan import PlannedRegion, simulate, smallest_budget, solve
from lowtide.plan._index import NEVER, TraceIndex
from lowtide.plan._local import Levels
from lowtide.plan._nested import nested_candidate
from lowtide.plan.solvers import chain_optimal, constrained_path
from lowtide.records import StepTrace

from ._traces import block_chain, chain


def floor(trace: StepTrace, solver: str) -> int:
    """The smallest peak of a solver's plans."""
    return solve(trace, max_slowdown=100.0, solver=solver).predicted_peak_bytes


def depth(regions: tuple[PlannedRegion, ...]) -> int:
    return max((1 + depth(region.inside) for region in regions), default=0)


@pytest.mark.parametrize("trace", [block_chain(12, inner=4), chain(16)], ids=["blocks", "layers"])
def test_the_default_goes_below_every_plan_of_one_level_and_every_schedule_of_blocks(trace) -> None:
    leanest = smallest_budget(trace)
    assert depth(leanest.regions) > 1
    assert leanest.predicted_peak_bytes == simulate(trace, leanest).peak_bytes
    assert leanest.predicted_peak_bytes < floor(trace, constrained_path.NAME)
    assert leanest.predicted_peak_bytes <= floor(trace, chain_optimal.NAME)


def test_a_budget_below_the_floor_of_one_level_is_met_and_one_above_it_is_no_slower() -> None:
    trace = block_chain(10, inner=4)
    low, high = smallest_budget(trace).predicted_peak_bytes, floor(trace, constrained_path.NAME)
    budgets = [low + (high - low) * i // 4 for i in range(6)]
    plans = [solve(trace, budget) for budget in budgets]
    assert all(plan.predicted_peak_bytes <= budget for plan, budget in zip(plans, budgets, strict=True))
    times = [plan.predicted_replay_s for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[-1] <= solve(trace, budgets[-1], solver=constrained_path.NAME).predicted_replay_s


def test_the_level_of_a_region_is_what_the_simulator_has_where_it_goes_backward() -> None:
    trace = block_chain(6, inner=4)
    index, blocks = TraceIndex(trace), [f"b{i}" for i in range(6)]
    for inside in [(), (PlannedRegion(("b0",)), PlannedRegion(("b2",)))]:
        candidate = nested_candidate(index, ("b0", "b1", "b2"), inside)
        rest = [PlannedRegion((path,)) for path in blocks[3:]]
        simulation = simulate(trace, [candidate.region, *rest])
        begin = min(replay.before for replay in candidate.replays)
        # The input of the first block is data; all that other regions hold is let go of by now.
        assert Levels(index).of(candidate.replays) == max(
            sum(moment.live_bytes) for moment in simulation.moments if moment.region[:1] in (("b0",), ("b2",)) or moment.op >= begin
        )
    assert Levels(index).of([replay for replay in candidate.replays if replay.before == NEVER]) == 0
