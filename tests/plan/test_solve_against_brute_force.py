"""The solver against every set of regions there is, on small random traces; and the executor against plain counting."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan import simulate, smallest_budget, solve
from lowtide.plan._candidates import candidates
from lowtide.plan._cuts import _FEW_CALLS as FEW_CALLS
from lowtide.plan._index import TraceIndex
from lowtide.plan._search import Search

from ._oracle import added_s, all_plans, timeline
from ._traces import random_trace

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
randoms = st.randoms(use_true_random=False)


@settings(COMMON, max_examples=40)
@given(randoms)
def test_simulation_equals_plain_counting_moment_by_moment(random) -> None:
    trace = random_trace(random, ops=7, functions=2)
    plans = [chosen for chosen, *_ in all_plans(trace)]
    keeping = [chosen for chosen in plans if any(region.kept for region in chosen)]
    ending = [chosen for chosen in plans if any(region.first_saved is not None for region in chosen)]
    for chosen in [plans[0], random.choice(plans), random.choice(keeping or plans), random.choice(ending or plans), max(plans, key=len)]:
        result = simulate(trace, chosen)
        counted = [("replay" if m.phase == "replay" else "step", m.op, sum(m.live_bytes)) for m in result.moments]
        assert counted == timeline(trace, chosen)
        assert result.added_s == pytest.approx(added_s(trace, chosen))
        assert result.peak_bytes == max(size for *_, size in counted)


def check_optimal(random, trace) -> None:
    index = TraceIndex(trace)
    offered = [c.region for c in candidates(index, nested=True).regions]
    more = [region for region in offered if region.inside]
    # Plans of rules have regions with others inside too.
    more += {r for rule in Search(trace, 60.0).rules for r in rule.regions if r.inside}.difference(more)
    # All ends are promised of small models; of others a few of each region are offered, and the choice among those is the best.
    every_end = index.module_calls <= FEW_CALLS
    more += [] if every_end else [region for region in offered if region.first_saved is not None]
    plans = [(peak, seconds) for _, peak, seconds in all_plans(trace, more, every_end=every_end)]
    floor = min(peak for peak, _ in plans)
    leanest = smallest_budget(trace)
    assert leanest.predicted_peak_bytes == floor
    assert leanest.predicted_replay_s == pytest.approx(min(s for p, s in plans if p == floor))
    budgets = sorted({peak for peak, _ in plans})
    for budget in [random.choice(budgets), budgets[len(budgets) // 2] + 1]:
        plan = solve(trace, budget)
        assert plan.predicted_peak_bytes <= budget
        assert plan.predicted_replay_s == pytest.approx(min(s for p, s in plans if p <= budget))
        assert plan.status == "optimal"
        assert simulate(trace, plan).peak_bytes == plan.predicted_peak_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(trace, floor - 1)
    assert (caught.value.budget_bytes, caught.value.smallest_bytes) == (floor - 1, floor)


@settings(COMMON, max_examples=50)
@given(randoms)
def test_solved_time_is_the_best_of_all_plans_at_every_budget(random) -> None:
    check_optimal(random, random_trace(random))


@settings(COMMON, max_examples=50)
@given(randoms)
def test_solved_time_is_the_best_of_all_plans_that_keep_calls(random) -> None:
    check_optimal(random, random_trace(random, ops=6, functions=3))
