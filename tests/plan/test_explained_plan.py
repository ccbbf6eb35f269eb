"""What is said of a plan, against simulations of the plan with one region otherwise."""

from __future__ import annotations

import dataclasses
import random

import pytest

from lowtide.errors import PlanError
from lowtide.explain import explain_plan
from lowtide.plan import Plan, PlannedRegion, simulate, smallest_budget, solve

from ._oracle import all_kept
from ._traces import block_chain, random_trace


def added(trace, regions) -> tuple[int, float]:
    result = simulate(trace, regions)
    return result.peak_bytes, result.added_s


def test_what_each_region_frees_and_takes_is_what_is_missing_without_it() -> None:
    trace = block_chain(6)
    plan = solve(trace, int(0.5 * simulate(trace, None).peak_bytes))
    found = explain_plan(trace, plan)
    assert [choice.paths for choice in found.regions] == [region.paths for region in plan.regions]
    assert (found.peak_bytes, found.plain_peak_bytes) == (plan.predicted_peak_bytes, simulate(trace, None).peak_bytes)
    for choice, region in zip(found.regions, plan.regions, strict=True):
        peak, seconds = added(trace, [r for r in plan.regions if r != region])
        assert choice.frees_bytes == peak - plan.predicted_peak_bytes
        assert choice.seconds == pytest.approx(plan.predicted_replay_s - seconds)


@pytest.mark.parametrize("seed", [3, 5, 9, 10, 15, 17, 18, 19])
def test_the_next_bytes_buy_most_where_no_other_change_of_one_region_buys_more(seed) -> None:
    trace = random_trace(random.Random(seed), ops=6, functions=3)
    plan = solve(trace, (smallest_budget(trace).budget_bytes + simulate(trace, None).peak_bytes) // 2)
    assert plan.regions
    for choice, region in zip(explain_plan(trace, plan).regions, plan.regions, strict=True):
        others = [r for r in plan.regions if r != region]
        more = [
            [*others, r] for r in all_kept(trace, region.paths) if len(r.kept) == len(region.kept) + 1 and set(region.kept) < set(r.kept)
        ]
        more = more if region.first_saved is None else []  # which has no kept calls
        buys = [added(trace, changed) for changed in [others, *more]]
        rates = [
            (plan.predicted_replay_s - s) / max(p - plan.predicted_peak_bytes, 1e-9) for p, s in buys if s < plan.predicted_replay_s - 1e-12
        ]
        assert (choice.next is None) == (not rates)
        if choice.next is not None:
            assert choice.next.seconds / max(choice.next.bytes, 1e-9) == pytest.approx(max(rates))


def test_a_plan_of_another_model_is_refused() -> None:
    trace = block_chain(4)
    plan = dataclasses.replace(solve(trace, 10**12), fingerprint="another", regions=(PlannedRegion(("b0",)),))
    with pytest.raises(PlanError, match="another model"):
        explain_plan(trace, plan)


def test_a_plan_without_regions_has_nothing_to_explain() -> None:
    trace = block_chain(4)
    found = explain_plan(trace, solve(trace, 10**12))
    assert (found.regions, found.next) == ((), None)


def test_a_region_with_regions_inside_is_explained_as_a_whole() -> None:
    trace = block_chain(6)
    inner = (PlannedRegion(("b0", "b1"), inside=(PlannedRegion(("b0",)),)), PlannedRegion(("b2",)))
    plan = Plan((PlannedRegion(("b0", "b1", "b2", "b3"), inside=inner), PlannedRegion(("b4",))), "f", 0, 0, 0.0, 0.0, "by hand")
    found = explain_plan(trace, plan)
    assert [choice.inside for choice in found.regions] == [3, 0]
    assert "3 regions inside" in found.regions[0].why
    assert found.peak_bytes == simulate(trace, plan).peak_bytes
    assert found.regions[0].frees_bytes == simulate(trace, plan.regions[1:]).peak_bytes - found.peak_bytes
