"""What the solver promises on models of known shape, beyond the comparison with brute force."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest

from lowtide.errors import InfeasibleBudgetError
from lowtide.plan import PlannedRegion, _replay, _trees, replayable_regions, simulate, smallest_budget, solve
from lowtide.plan._candidates import candidates
from lowtide.plan._index import TraceIndex
from lowtide.plan._problem import memory_model
from lowtide.plan.solvers import all_blocks, every_n, first_k, mixed_integer, none, sqrt_n
from lowtide.plan.solvers._quiet import quiet
from lowtide.records import Category, Phase, StepTrace

from ._traces import MB, Writer, block_chain, chain


def u_shape(levels: int, size: int = 8 * MB) -> StepTrace:
    """Down and up again; each way up takes what the way down at its level made. Inner levels are smaller."""
    w = Writer()
    x = w.resident(size, Category.INPUT)
    slots, skips = [], []

    def block(path: str, inputs: list[int], out: int) -> int:
        w.enter(path, inputs)
        w.op(1.0)
        middle = w.new(out)
        slots.append([w.save(inputs[0])])
        w.op(1.0)
        y = w.new(out)
        slots.append([w.save(middle), *(w.save(s) for s in inputs[1:])])
        w.free(middle)
        w.leave([y])
        return y

    for level in range(levels):
        y = block(f"down.{level}", [x], size >> level)
        skips.append(y)
        x = y
    for level in reversed(range(levels)):
        y = block(f"up.{level}", [x, skips[level]], size >> level)
        w.free(x)
        w.free(skips[level])
        x = y
    w.free(x)
    before = None
    for group in reversed(slots):
        for slot in group:
            w.use(slot)
        w.op(1.0, phase=Phase.BACKWARD)
        gradient = w.new(MB)
        if before is not None:
            w.free(before)
        before = gradient
        for slot in group:
            w.release(slot)
    return w.trace()


@pytest.mark.parametrize("trace", [chain(12), block_chain(8), u_shape(4)], ids=["chain", "blocks", "u-shape"])
def test_a_larger_budget_is_never_slower(trace) -> None:
    floor, plain = smallest_budget(trace).budget_bytes, simulate(trace, None).peak_bytes
    plans = [solve(trace, floor + (plain - floor) * i // 8) for i in range(9)]
    times = [plan.predicted_replay_s for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0.0
    assert all(plan.predicted_peak_bytes <= plan.budget_bytes for plan in plans)
    assert all(plan.status == "optimal" for plan in plans)
    assert floor < plain


def test_no_regions_where_the_step_fits_as_it_is() -> None:
    trace = chain(6)
    plan = solve(trace, simulate(trace, None).peak_bytes)
    assert (plan.regions, plan.solver, plan.status, plan.gap) == ((), "none", "optimal", 0.0)


def test_a_plan_says_what_it_was_made_from() -> None:
    trace = dataclasses.replace(chain(6), fingerprint="abc", device="cuda:1", torch_version="2.13.0")
    plan = solve(trace, 60 * MB)
    assert (plan.fingerprint, plan.device, plan.torch_version, plan.budget_bytes) == ("abc", "cuda:1", "2.13.0", 60 * MB)
    judged = simulate(trace, plan)
    assert (plan.predicted_peak_bytes, plan.predicted_step_s, plan.predicted_replay_s) == (
        judged.peak_bytes,
        judged.planned_s,
        judged.added_s,
    )


def test_an_infeasible_budget_names_the_smallest_and_what_holds_it() -> None:
    trace = chain(12)
    floor = smallest_budget(trace).budget_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(trace, floor - 1)
    assert caught.value.smallest_bytes == floor
    assert f"({floor} bytes)" in str(caught.value)
    assert "of activations" in str(caught.value)
    assert solve(trace, caught.value.smallest_bytes).predicted_peak_bytes == floor


def test_a_step_with_nothing_to_replay_is_infeasible_below_its_peak() -> None:
    w = Writer()
    w.op()
    w.free(w.new(5 * MB))
    w.op(phase=Phase.BACKWARD)
    trace = w.trace()
    assert solve(trace, 5 * MB).regions == ()
    with pytest.raises(InfeasibleBudgetError, match=r"whose peak is in forward, at op, with 4\.77 MiB of activations"):
        solve(trace, 5 * MB - 1)


def test_layers_that_only_save_what_the_one_before_made_can_be_replayed_together() -> None:
    assert replayable_regions(chain(3)) == (("0", "1"), ("1", "2"), ("0", "1", "2"))
    assert replayable_regions(chain(1)) == ()


def test_an_empty_step_is_no_error() -> None:
    empty = StepTrace((), (), (), (), "f", "cpu")
    assert simulate(empty, None).peak_bytes == 0
    assert solve(empty, 0).regions == ()


def test_no_better_than_rules_of_thumb_never_happens() -> None:
    trace = block_chain(7, inner=4)
    index = TraceIndex(trace)
    for rule in (none, all_blocks, every_n, first_k, sqrt_n):
        for regions in rule.regions(index):
            judged = simulate(trace, regions)
            assert solve(trace, judged.peak_bytes).predicted_replay_s <= judged.added_s


def test_rules_of_thumb_over_the_blocks_of_a_model() -> None:
    index = TraceIndex(block_chain(6))
    paths = lambda plans: [[r.paths for r in plan] for plan in plans]  # noqa: E731
    assert paths(none.regions(index)) == [[]]
    assert paths(all_blocks.regions(index)) == [[(f"b{i}",) for i in range(6)]]
    assert [("b0",), ("b2",), ("b4",)] in paths(every_n.regions(index))
    assert [("b0", "b1"), ("b2", "b3"), ("b4", "b5")] in paths(sqrt_n.regions(index))
    assert [("b0", "b1", "b2", "b3"), ("b4", "b5")] in paths(sqrt_n.regions(index))


def test_a_module_that_may_not_run_twice_is_left_alone() -> None:
    trace = block_chain(4)
    calls = (trace.calls[0], dataclasses.replace(trace.calls[1], replayable=False), *trace.calls[2:])
    trace = dataclasses.replace(trace, calls=calls)
    plan = smallest_budget(trace)
    assert "b1" not in {path for region in plan.regions for path in region.paths}
    assert plan.predicted_peak_bytes < simulate(trace, None).peak_bytes


def test_a_module_and_all_there_is_in_it_are_one_candidate() -> None:
    w = Writer()
    w.enter("outer", [])
    w.enter("outer.inner", [])
    w.op()
    a = w.new(MB)
    slot = w.save(a)
    w.leave([a])
    w.leave([a])
    w.free(a)
    w.op()
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    found = candidates(TraceIndex(w.trace()))
    assert [c.paths for c in found.regions] == [("outer",)]


def test_the_longest_segments_are_left_out_of_very_long_models_and_that_is_said() -> None:
    index = TraceIndex(chain(40))
    assert candidates(index).complete
    few = candidates(index, most_segments=100)
    assert not few.complete
    assert max(len(c.paths) for c in few.regions) < 5


def test_no_time_at_all_still_gives_a_plan_that_fits() -> None:
    trace = block_chain(12, inner=5)
    budget = simulate(trace, [PlannedRegion((f"b{i}",)) for i in range(12)]).peak_bytes
    plan = solve(trace, budget, time_limit_s=0.0)
    assert plan.predicted_peak_bytes <= budget
    assert plan.status == "feasible"
    assert plan.gap is None or 0 < plan.gap <= 1


def test_an_overshoot_of_the_program_is_solved_again_with_less() -> None:
    # A model that has lost 15 MB of every moment lets plans through that are over budget in truth.
    trace = block_chain(6)
    index = TraceIndex(trace)
    honest = memory_model(index, candidates(index).regions)
    light = dataclasses.replace(honest, constant=honest.constant - 15 * MB)
    outcome = mixed_integer.fastest_within(index, light, 120 * MB, time_limit_s=10.0)
    assert outcome.simulation.peak_bytes <= 120 * MB


def test_twenty_four_blocks_are_solved_to_the_optimum() -> None:
    trace = block_chain(24, inner=6)
    plain = simulate(trace, None).peak_bytes
    for share in (0.4, 0.6):
        assert solve(trace, int(share * plain), time_limit_s=600.0).status == "optimal"


def test_what_the_solver_library_prints_is_dropped_and_nothing_else(capfd) -> None:
    with quiet():
        os.write(1, b"HighsMipSolverData::something\n")
        print("from Python")
        os.write(1, b"from another thread\n")
    print("afterwards")
    assert sorted(capfd.readouterr().out.splitlines()) == ["afterwards", "from Python", "from another thread"]


def test_a_solve_prints_nothing(capfd) -> None:
    trace = block_chain(12, inner=5)
    solve(trace, 2 * smallest_budget(trace).budget_bytes)
    assert capfd.readouterr() == ("", "")


def test_candidates_are_whole_once_time_is_up_and_nothing_is_proved_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = block_chain(12, inner=5)
    budget = simulate(trace, [PlannedRegion((f"b{i}",)) for i in range(12)]).peak_bytes
    assert solve(trace, budget, time_limit_s=1000.0).status == "optimal"
    clock, read, limit_s = [0.0], _replay.read, 600.0
    choosing: list[float] = []

    def slow(
        index: TraceIndex, paths: tuple[str, ...], calls: tuple[int, ...], kept: tuple, *rest: object, **more: object
    ) -> _replay.Replay:
        clock[0] += 1.0
        if kept or rest or more.get("first_saved") is not None:
            choosing.append(clock[0])
        return read(index, paths, calls, kept, *rest, **more)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    for module in (_replay, _trees):
        monkeypatch.setattr(module, "read", slow)
    plan = solve(trace, budget, time_limit_s=limit_s)
    assert (plan.predicted_peak_bytes <= budget, plan.status, plan.solver) == (True, "feasible", "nested-path")
    assert 0 < max(choosing) < 0.75 * limit_s
    assert clock[0] < limit_s


def test_all_regions_are_candidates_however_little_time_there_is() -> None:
    trace = block_chain(12, inner=5)
    every, whole = candidates(TraceIndex(trace), nested=True), candidates(TraceIndex(trace), nested=True, until=0.0)
    assert (every.complete, whole.complete) == (True, False)
    assert any(c.inside or c.first_saved is not None for c in every.regions)
    assert not any(c.kept or c.inside or c.first_saved is not None for c in whole.regions)
    assert {c.paths for c in every.regions} <= {c.paths for c in whole.regions}
