"""Schedules of chains against brute force: binomial and chain-optimal, in their own models and as the simulator judges them."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from lowtide.errors import InvalidInputError
from lowtide.plan import simulate, solve
from lowtide.plan._index import TraceIndex
from lowtide.plan.solvers import binomial, chain_optimal
from lowtide.plan.solvers._chain import Run, Schedule, chain_of
from lowtide.plan.solvers.chain_optimal import Stages, Table
from lowtide.records import StepTrace

from ._traces import MB, Writer, block_chain, chain
from .test_solve import u_shape


@cache
def all_schedules(start: int, stop: int) -> tuple[Schedule, ...]:
    """Every way to deal with some stages: the first is left, or the first few are a run with any schedule in it. The last is left."""
    if stop - start == 1:
        return ((),)
    found = [*all_schedules(start + 1, stop)]
    for k in range(start + 1, stop):
        found += [(Run(start, k, inner), *rest) for inner in all_schedules(start, k) for rest in all_schedules(k, stop)]
    return tuple(found)


def counted(schedule: Schedule, start: int, stop: int) -> tuple[int, int]:
    """Forward runs of stages, and the most inputs held at once beside the first, by going through it."""
    runs, held, most, waiting = stop - start, 0, 0, []
    i = start
    while i < stop:
        run = next((r for r in schedule if r.start == i), None)
        if run is not None:
            waiting.append((run, held))
            held += run.stop < stop - 1  # the input of the last one is what it goes on with
        i = i + 1 if run is None else run.stop
        most = max(most, held)
    for run, around in waiting:
        inner_runs, inner_most = counted(run.inside, run.start, run.stop)
        runs, most = runs + inner_runs, max(most, around + inner_most)
    return runs, most


def is_whole(schedule: Schedule, start: int, stop: int) -> bool:
    """Whether one stage at a time is held whole: revolve has it so."""
    inside = sum(run.stop - run.start for run in schedule)
    return inside == stop - start - 1 and all(is_whole(run.inside, run.start, run.stop) for run in schedule)


@pytest.mark.parametrize("stages", range(1, 8))
def test_binomial_runs_the_fewest_stages_for_what_it_may_hold(stages: int) -> None:
    tried = [counted(s, 0, stages) for s in all_schedules(0, stages) if is_whole(s, 0, stages)]
    for held in range(1, stages):
        runs, most = counted(binomial.schedule(stages, held), 0, stages)
        assert most <= held
        assert runs == min(r for r, m in tried if m <= held) == binomial.forward_runs(stages, held)


@pytest.mark.parametrize(("stages", "held", "runs"), [(10, 2, 25), (56, 4, 196), (100, 99, 199)])
def test_binomial_numbers_known_from_the_formula(stages: int, held: int, runs: int) -> None:
    # (r + 1) * l - C(c + r, r - 1), with c one more for the first input: 3 * 10 - 5, 4 * 56 - 28, 2 * 100 - 1.
    assert counted(binomial.schedule(stages, held), 0, stages)[0] == runs


def executed(stages: Stages, schedule: Schedule, start: int, stop: int, memory: int) -> float:
    """Time of all forward runs; infinite if it does not fit beside the first input. By going through it."""
    held, seconds, waiting, i = 0, 0.0, [], start
    gradient = int(stages.gradient[stop - 1]) if stop < len(stages.seconds) else 0
    while i < stop:
        run = next((r for r in schedule if r.start == i), None)
        following = i + 1 if run is None else run.stop
        kept, given = (int(stages.kept[i]), int(stages.given[i])) if i > start else (0, 0)
        if run is None:
            most = max(given + stages.saving[i] + gradient, kept + stages.backward[i])
            seconds, after = seconds + float(stages.seconds[i]), held + kept + int(stages.saved[i])
        else:
            most = max(given + gradient + stages.forward[k] + (stages.given[k] if k > i else 0) for k in range(i, following))
            seconds, after = seconds + float(stages.seconds[i:following].sum()), held + given
            waiting.append((run, memory - after))
        if held + most > memory:
            return math.inf
        held, i = after, following
    return math.inf if held > memory else seconds + sum(executed(stages, r.inside, r.start, r.stop, left) for r, left in waiting)


@pytest.mark.parametrize("seed", range(12))
def test_chain_optimal_is_the_best_of_all_schedules_in_every_memory(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 6)
    column = lambda low, high: np.array([draw.randint(low, high) for _ in range(count)], dtype=np.int64)  # noqa: E731
    stages = Stages(column(1, 5).astype(float), *(column(0, 4) for _ in range(7)))
    table = Table(stages)
    assert table.feasible()
    for memory in table.feasible():
        best = min(executed(stages, s, 0, count, memory) for s in all_schedules(0, count))
        assert table.seconds(memory) == best == executed(stages, table.schedule(memory), 0, count, memory)
    below = table.feasible()[0] - 1
    assert all(executed(stages, s, 0, count, below) == math.inf for s in all_schedules(0, count))


def uneven() -> StepTrace:
    """Five blocks of different sizes and times."""
    trace = block_chain(5, inner=2)
    size = [MB * (1 + (7 * i) % 5) for i in range(len(trace.storages))]
    storages = tuple(dataclasses.replace(s, bytes=b) for s, b in zip(trace.storages, size, strict=True))
    saved = tuple(dataclasses.replace(s, bytes=storages[s.storage].bytes) for s in trace.saved)
    ops = tuple(dataclasses.replace(op, seconds=1.0 + (3 * i) % 4) for i, op in enumerate(trace.ops))
    return dataclasses.replace(trace, storages=storages, saved=saved, ops=ops)


def best_times(trace: StepTrace) -> Iterator[tuple[float, float]]:
    """At each budget that matters, the replays of the best of all schedules, and of the solver's plan."""
    index = TraceIndex(trace)
    stages = chain_of(index, "test")
    every = [simulate(trace, stages.regions(s)) for s in all_schedules(0, len(stages.paths))]
    for budget in sorted({s.peak_bytes for s in every}):
        judged = simulate(trace, solve(trace, budget, solver=chain_optimal.NAME))
        assert judged.peak_bytes <= budget
        yield min(s.replay_s for s in every if s.peak_bytes <= budget), judged.replay_s


@pytest.mark.parametrize("trace", [block_chain(5), chain(6)], ids=["blocks", "layers"])
def test_no_schedule_of_equal_stages_is_faster_as_the_simulator_judges(trace: StepTrace) -> None:
    for best, found in best_times(trace):
        assert found == pytest.approx(best)


def test_few_schedules_of_unlike_stages_are_faster_as_the_simulator_judges() -> None:
    # Peaks of neighbouring stages meet in ways that the recurrence does not know.
    times = list(best_times(uneven()))
    assert sum(found > best + 1e-9 for best, found in times) <= len(times) / 4
    assert all(found <= 1.3 * best for best, found in times)


def test_nesting_goes_below_every_plan_of_one_level() -> None:
    trace = block_chain(12, inner=4)
    one_level = solve(trace, max_slowdown=10.0, solver="sqrt-n").predicted_peak_bytes
    assert solve(trace, max_slowdown=10.0, solver=binomial.NAME).predicted_peak_bytes < one_level
    assert solve(trace, max_slowdown=10.0, solver=chain_optimal.NAME).predicted_peak_bytes < one_level / 2


def test_long_chains_are_taken_in_groups() -> None:
    trace = block_chain(230, inner=2)
    plan = solve(trace, simulate(trace, None).peak_bytes // 4, solver=chain_optimal.NAME)
    assert plan.predicted_peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("solver", [binomial.NAME, chain_optimal.NAME])
@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (u_shape(3), r"'up\.1' takes what 'down\.1' made, which is not the one before it"),
        (chain(1), "calls no modules one after the other"),
    ],
    ids=["skips", "one module"],
)
def test_steps_that_are_no_chain_are_refused(solver: str, trace: StepTrace, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        solve(trace, 1, solver=solver)


def test_a_module_that_is_called_twice_is_no_stage() -> None:
    w = Writer()
    for _ in range(2):
        w.enter("a")
        w.op()
        y = w.new(MB)
        w.save(y)
        w.leave([y])
    w.op()
    with pytest.raises(InvalidInputError, match="'a' is called 2 times"):
        solve(w.trace(), 1, solver=binomial.NAME)


def test_the_chain_is_the_blocks_and_not_the_two_halves_around_them() -> None:
    trace = block_chain(6, inner=2)
    stop = len(trace.calls)
    halves = [trace.calls[0], trace.calls[3]]
    around = [dataclasses.replace(c, path=f"half{i}", type="Half", end=trace.calls[i * 3 + 2].end) for i, c in enumerate(halves)]
    around = [dataclasses.replace(c, outputs=trace.calls[i * 3 + 2].outputs) for i, c in enumerate(around)]
    place = {old: old + 1 + old // 3 for old in range(stop)}
    inner = [dataclasses.replace(c, path=f"half{i // 3}.{c.path}", parent=4 * (i // 3)) for i, c in enumerate(trace.calls)]
    calls = (around[0], *inner[:3], around[1], *inner[3:])
    ops = tuple(dataclasses.replace(op, call=None if op.call is None else place[op.call]) for op in trace.ops)
    saved = tuple(dataclasses.replace(s, call=None if s.call is None else place[s.call]) for s in trace.saved)
    nested = dataclasses.replace(trace, calls=calls, ops=ops, saved=saved)
    assert chain_of(TraceIndex(nested), "test").paths == tuple(c.path for c in inner)
