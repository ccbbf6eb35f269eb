"""Every solver of the registry on its own, against every plan that it could have; and what may be asked of ``solve``."""

from __future__ import annotations

import random

import pytest

from lowtide.errors import BudgetError, InfeasibleBudgetError, InvalidInputError
from lowtide.plan import PlannedRegion, frontier, simulate, smallest_budget, solve
from lowtide.plan._candidates import candidates
from lowtide.plan._index import TraceIndex
from lowtide.plan.solvers import all_blocks, constrained_path, every_n, exact, first_k, mixed_integer, none, sqrt_n
from lowtide.plan.solvers.registry import SOLVERS

from ._oracle import all_plans
from ._traces import MB, block_chain, chain, random_trace


def shapes_of(name: str, blocks: int) -> list[list[tuple[str, ...]]]:
    """The plans that a rule stands for, written from its words."""
    b = [f"b{i}" for i in range(blocks)]
    segments = [[tuple(b[i : i + n]) for i in range(0, blocks, n)] for n in range(2, blocks)]
    return {
        none.NAME: [[]],
        all_blocks.NAME: [[(p,) for p in b]],
        every_n.NAME: [[(p,) for p in b[::n]] for n in range(2, blocks)],
        first_k.NAME: [[(p,) for p in b[:k]] for k in range(1, blocks)],
        sqrt_n.NAME: [*segments, *(s[:-1] for s in segments)],
    }[name]


@pytest.mark.parametrize("name", [name for name, solver in SOLVERS.items() if solver.rule is not None and not solver.nests])
def test_a_rule_gives_the_fastest_of_its_plans_that_fits(name) -> None:
    trace = block_chain(7)
    judged = [simulate(trace, [PlannedRegion(paths) for paths in plan]) for plan in shapes_of(name, 7)]
    judged.append(simulate(trace, None))
    for budget in {j.peak_bytes for j in judged}:
        best = min(j.added_s for j in judged if j.peak_bytes <= budget)
        plan = solve(trace, budget, solver=name)
        assert plan.predicted_replay_s == pytest.approx(best)
        assert plan.solver in (name, none.NAME)
    with pytest.raises(InfeasibleBudgetError):
        solve(trace, min(j.peak_bytes for j in judged) - 1, solver=name)


@pytest.mark.parametrize("name", [constrained_path.NAME, mixed_integer.NAME])
def test_a_search_alone_finds_the_best_of_all_plans(name) -> None:
    for seed in range(12):
        trace = random_trace(random.Random(seed), ops=6, functions=2)
        plans = [(peak, seconds) for _, peak, seconds in all_plans(trace)]
        budget = sorted(peak for peak, _ in plans)[len(plans) // 3]
        found = solve(trace, budget, solver=name)
        assert found.predicted_replay_s == pytest.approx(min(s for p, s in plans if p <= budget))
        assert found.status == "optimal"


def test_whole_regions_alone_find_the_best_plan_that_keeps_nothing() -> None:
    for seed in range(12):
        trace = random_trace(random.Random(seed), ops=6, functions=2)
        every_plan = all_plans(trace, every_end=False)
        plans = [(peak, seconds) for regions, peak, seconds in every_plan if not any(r.kept for r in regions)]
        budget = sorted(peak for peak, _ in plans)[len(plans) // 3]
        found = solve(trace, budget, solver=exact.WHOLE_REGION)
        assert found.predicted_replay_s == pytest.approx(min(s for p, s in plans if p <= budget))


def test_the_two_exact_solvers_agree_on_a_chain_of_blocks() -> None:
    trace = block_chain(8, inner=4)
    for share in (0.4, 0.6, 0.8):
        budget = int(share * simulate(trace, None).peak_bytes)
        one, other = (solve(trace, budget, solver=name) for name in (constrained_path.NAME, mixed_integer.NAME))
        assert one.predicted_replay_s == pytest.approx(other.predicted_replay_s, rel=2e-3)


def test_every_solver_says_where_it_is_from() -> None:
    assert all(solver.source and solver.complexity and (solver.rule is None) != (solver.exact is None) for solver in SOLVERS.values())


def test_an_unknown_solver_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidInputError, match=r"no solver 'best': choose from auto, none, all, "):
        solve(chain(3), 1, solver="best")


def test_the_leanest_plan_that_is_fast_enough() -> None:
    for seed in range(12):
        trace = random_trace(random.Random(seed))
        step_s = simulate(trace, None).step_s
        plans = [(peak, seconds) for _, peak, seconds in all_plans(trace)]
        for slowdown in (0.0, 0.1, 0.3):
            plan = solve(trace, max_slowdown=slowdown)
            assert plan.predicted_peak_bytes == min(peak for peak, seconds in plans if seconds <= slowdown * step_s)
            assert plan.budget_bytes == plan.predicted_peak_bytes
            assert plan.predicted_replay_s <= slowdown * step_s


@pytest.mark.parametrize("asked", [{}, {"budget_bytes": 5, "max_slowdown": "5%"}])
def test_a_budget_or_a_slowdown_is_asked_for(asked) -> None:
    with pytest.raises(InvalidInputError, match="pass one of budget_bytes and max_slowdown"):
        solve(chain(3), **asked)


@pytest.mark.parametrize("slowdown", ["fast", "5% of activations", -0.1, True, float("nan")])
def test_a_slowdown_that_cannot_be_read(slowdown) -> None:
    with pytest.raises(BudgetError, match="write a share of the step's time"):
        solve(chain(3), max_slowdown=slowdown)


def test_the_frontier_falls_from_the_leanest_plan_to_the_step_as_it_is() -> None:
    trace = block_chain(8)
    found = frontier(trace, points=9)
    peaks, times = zip(*found.points(), strict=True)
    assert list(peaks) == sorted(set(peaks))
    assert list(times) == sorted(set(times), reverse=True)
    assert (peaks[-1], times[-1]) == (simulate(trace, None).peak_bytes, 1.0)
    assert peaks[0] == smallest_budget(trace).budget_bytes
    assert all(solve(trace, plan.budget_bytes).predicted_replay_s == pytest.approx(plan.predicted_replay_s) for plan in found.plans)


def test_the_knee_is_where_less_memory_becomes_dear() -> None:
    found = frontier(block_chain(8, size=10 * MB), points=9)
    first, last = found.plans[0], found.plans[-1]

    def below(plan) -> float:
        """How far a plan lies below the line between the ends."""
        along = (plan.predicted_peak_bytes - first.predicted_peak_bytes) / (last.predicted_peak_bytes - first.predicted_peak_bytes)
        return first.predicted_replay_s * (1 - along) - plan.predicted_replay_s

    assert below(found.knee) == pytest.approx(max(map(below, found.plans)))
    assert below(found.knee) > 0


def test_a_frontier_of_one_point_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="two points or more"):
        frontier(chain(3), points=1)


def test_blocks_that_are_alike_are_looked_into_once_and_nothing_is_lost(monkeypatch) -> None:
    trace = block_chain(10, inner=4)
    index = TraceIndex(trace)
    named = {(c.paths, c.kept) for c in candidates(index).regions}
    monkeypatch.setattr("lowtide.plan._equal._MANY_CALLS", 1)
    assert {(c.paths, c.kept) for c in candidates(TraceIndex(trace)).regions} == named
