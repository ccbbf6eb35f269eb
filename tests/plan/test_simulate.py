"""The executor against timelines worked out by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable

import pytest

from lowtide.errors import PlanError
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.records import Category, Decision, Phase

from ._traces import MB, Writer, block_chain, chain, random_trace


def recompute(*segments: tuple[str, ...]) -> list[PlannedRegion]:
    return [PlannedRegion(paths) for paths in segments]


def megabytes(result) -> list[int]:
    return [sum(m.live_bytes) // MB for m in result.moments]


def told(result) -> list[str]:
    return [f"{m.phase[0]}{m.op}" for m in result.moments]


def test_four_layers_as_traced() -> None:
    # x0 is the input, xi the result of layer i, all 10 MB; layer i saves its input x(i-1).
    # Forward op i: x0 … xi are saved or at hand, that is 10 (i + 2) with i counted from 0:  20 30 40 50
    # Backward: the result x4 is gone, the first gradient is there instead:  50 (x0 … x3 and g)
    # Then one more gradient at a time next to the one before, while one saved tensor less is there:
    #   x0 x1 x2 g g' 50,  x0 x1 g g' 40,  x0 g g' 30
    result = simulate(chain(4), None)
    assert megabytes(result) == [20, 30, 40, 50, 50, 50, 40, 30]
    assert (result.peak_bytes, result.peak_moment) == (50 * MB, 3)
    assert (result.step_s, result.replay_s) == (8.0, 0.0)


def test_four_layers_in_two_segments() -> None:
    # Segment (0 1) drops x1, segment (2 3) drops x3; they hold x0 and x2, which their first layers saved anyway.
    # Forward:  f0 x0 x1 = 20,  f1 x0 x1 x2 = 30,  f2 x0 x2 x3 = 30 (x1 is gone),  f3 x0 x2 x3 x4 = 40 (x3 feeds layer 3)
    # Before op 4 layer 3 wants x3: gap holds x0 x2 = 20; replay of layers 2 and 3:  +x3 = 30,  +x3 +x4 = 40; x4 dies with the early stop
    # Backward:  b4 x0 x2 x3 g = 40,  b5 x0 x2 g g' = 40
    # Before op 6 layer 1 wants x1: gap holds x0 and g' = 20; replay of 0 and 1:  30, 40
    # Backward:  b6 x0 x1 g' g'' = 40,  b7 x0 g'' g''' = 30
    result = simulate(chain(4), recompute(("0", "1"), ("2", "3")))
    assert told(result) == ["f0", "f1", "f2", "f3", "r2", "r3", "b4", "b5", "r0", "r1", "b6", "b7"]
    assert megabytes(result) == [20, 30, 30, 40, 30, 40, 40, 40, 30, 40, 40, 30]
    assert result.peak_bytes == 40 * MB
    assert (result.step_s, result.replay_s) == (12.0, 4.0)
    assert [m.region for m in result.moments if m.phase == "replay"] == [("2", "3")] * 2 + [("0", "1")] * 2
    assert [m.start_s for m in result.moments] == [float(i) for i in range(12)]


def test_three_blocks_of_three_ops_each_replayed() -> None:
    # Each op makes and saves 10 MB. Plain: x0, nine results, one gradient beside the last before: 10 + 90 + 10 = 110 at b9
    # Each block replayed: the gap before op 9 has the inputs of three blocks, 30, and the replay adds 10, 20, 30.
    # b9: those 30, the three results of block 2 again, and a gradient: 70. Block 1, before op 12: the inputs of two
    # blocks and a gradient are 30, the replay adds 10, 20, 30; b12: these 60 and one more gradient: 70. Block 0: 10 less.
    trace = block_chain(3)
    assert simulate(trace, None).peak_bytes == 110 * MB
    result = simulate(trace, recompute(("b0",), ("b1",), ("b2",)))
    assert result.peak_bytes == 70 * MB
    assert [s for s, m in zip(megabytes(result), result.moments, strict=True) if m.phase == "replay"] == [
        40,
        50,
        60,
        40,
        50,
        60,
        30,
        40,
        50,
    ]
    assert result.replay_s == 9.0


def test_early_stop_leaves_out_what_no_dropped_tensor_needs() -> None:
    # The block makes a (5 MB, saved) and then y (7 MB, not saved): a replay needs the first op alone.
    w = Writer()
    x = w.resident(3 * MB)
    w.enter("b", [x])
    w.op()
    a = w.new(5 * MB)
    slot = w.save(a)
    w.op()
    w.free(a)
    y = w.new(7 * MB)
    w.leave([y])
    w.op(phase=Phase.FORWARD)
    w.free(y)
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    result = simulate(w.trace(), recompute(("b",)))
    assert told(result) == ["f0", "f1", "f2", "r0", "b3"]
    assert megabytes(result) == [8, 15, 10, 8, 8]  # x a | x a y | x y | x a | x a


def test_workspace_counts_as_temporary_while_its_op_runs_and_again_in_the_replay() -> None:
    w = Writer()
    w.resident(1 * MB)
    w.enter("b", [])
    w.op(workspace=4 * MB)
    a = w.new(2 * MB)
    slot = w.save(a)
    w.leave([a])
    w.free(a)
    w.op()
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    result = simulate(w.trace(), recompute(("b",)))
    assert megabytes(result) == [7, 1, 7, 3]  # the second op of the forward has dropped a
    temporary = list(Category).index(Category.TEMPORARY)
    assert [m.live_bytes[temporary] // MB for m in result.moments] == [4, 0, 4, 0]


def test_what_is_alive_anyway_is_kept_and_not_replayed() -> None:
    w = Writer()
    w.enter("b", [])
    w.op()
    kept = w.new(5 * MB)
    slot = w.save(kept)
    w.leave([kept])
    w.op()
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    result = simulate(w.trace(), recompute(("b",)))  # the user still has `kept` after the step
    assert told(result) == ["f0", "f1", "b2"]
    assert megabytes(result) == [5, 5, 5]


def test_inputs_are_held_until_the_last_dropped_tensor_is_released() -> None:
    # x (6 MB) is no saved tensor; the region holds it from its call until a is released, after the second backward op.
    w = Writer()
    w.op()
    x = w.new(6 * MB)
    w.enter("b", [x])
    w.op()
    a = w.new(2 * MB)
    slot = w.save(a)
    w.leave([a])
    w.free(x)
    w.free(a)
    w.op()
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    w.op(phase=Phase.BACKWARD)
    trace = w.trace()
    assert megabytes(simulate(trace, None)) == [6, 8, 2, 2, 2, 0]
    assert megabytes(simulate(trace, recompute(("b",)))) == [6, 8, 6, 8, 8, 8, 0]


def test_a_region_called_twice_is_replayed_for_each_call() -> None:
    w = Writer()
    slots = []
    for _ in range(2):
        w.enter("b", [])
        w.op()
        a = w.new(4 * MB)
        slots.append(w.save(a))
        w.leave([a])
        w.free(a)
    w.op()
    for slot in reversed(slots):
        w.use(slot)
        w.op(phase=Phase.BACKWARD)
        w.release(slot)
    result = simulate(w.trace(), recompute(("b",)))
    assert told(result) == ["f0", "f1", "f2", "r1", "b3", "r0", "b4"]
    assert megabytes(result) == [4, 4, 0, 4, 4, 4, 4]


def test_a_member_called_outside_of_the_run_is_a_region_of_its_own() -> None:
    # (p q) is a run; the second call of p stands alone and is replayed alone.
    w = Writer()
    slots: list[int] = []
    made: list[int] = []
    for path in ("p", "q", "r", "p"):
        w.enter(path, made)
        w.op()
        a = w.new(1 * MB)
        slots.append(w.save(a))
        w.leave([a])
        w.free(a)
        made = [a]
    w.op()
    for slot in reversed(slots):
        w.use(slot)
        w.op(phase=Phase.BACKWARD)
        w.release(slot)
    result = simulate(w.trace(), recompute(("p", "q")))
    assert told(result) == ["f0", "f1", "f2", "f3", "f4", "r3", "b5", "b6", "r0", "r1", "b7", "b8"]


def test_a_module_that_calls_itself_is_replayed_with_its_outermost_call() -> None:
    w = Writer()
    w.enter("m", [])
    w.op()
    w.enter("m", [])
    w.op()
    a = w.new(1 * MB)
    slot = w.save(a)
    w.leave([a])
    w.leave([a])
    w.free(a)
    w.op()
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    assert told(simulate(w.trace(), recompute(("m",)))) == ["f0", "f1", "f2", "r0", "r1", "b3"]


def test_what_a_region_saves_after_a_backward_of_its_own_is_kept() -> None:
    # Inside b: op 0 saves a, op 1 frees it, op 2 is a backward that wants a, op 3 saves c; op 5 wants c.
    w = Writer()
    w.enter("b", [])
    w.op()
    a = w.new(1 * MB)
    first = w.save(a)
    w.free(a)
    w.op()
    w.use(first)
    w.op(phase=Phase.BACKWARD)
    w.release(first)
    w.op()
    c = w.new(2 * MB)
    second = w.save(c)
    w.free(c)
    w.leave([])
    w.op()
    w.use(second)
    w.op(phase=Phase.BACKWARD)
    w.release(second)
    result = simulate(w.trace(), recompute(("b",)))
    assert told(result) == ["f0", "f1", "r0", "b2", "f3", "f4", "b5"]
    assert megabytes(result) == [1, 0, 1, 1, 2, 2, 2]


def test_a_saved_tensor_that_backward_never_asks_for_is_dropped_for_good() -> None:
    w = Writer()
    w.enter("b", [])
    w.op()
    a = w.new(3 * MB)
    w.save(a)
    w.leave([a])
    w.free(a)
    w.op()
    w.op(phase=Phase.BACKWARD)
    trace = w.trace()
    assert megabytes(simulate(trace, None)) == [3, 3, 3]
    assert megabytes(simulate(trace, recompute(("b",)))) == [3, 0, 0]


def test_keep_leaves_a_region_as_it_is() -> None:
    trace = chain(4)
    assert simulate(trace, [PlannedRegion(("0", "1"), Decision.KEEP)]) == simulate(trace, None)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (recompute(("nowhere",)), "calls no such module"),
        (recompute(("0", "2")), "never run one after the other"),
        (recompute(("0", "1"), ("1", "2")), "overlap"),
        ([PlannedRegion(("0",), Decision.OFFLOAD)], "only keep and recompute"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(regions, message) -> None:
    with pytest.raises(PlanError, match=message):
        simulate(chain(4), regions)


def test_a_region_inside_another_by_its_calls_is_refused() -> None:
    # The names do not tell: "inner" is called from within "outer".
    w = Writer()
    w.enter("outer", [])
    w.enter("inner", [])
    w.op()
    w.leave()
    w.leave()
    with pytest.raises(PlanError, match=r"outer.*inner.*overlap"):
        simulate(w.trace(), recompute(("outer",), ("inner",)))


def test_a_region_that_may_not_run_twice_is_refused_with_all_around_it() -> None:
    trace = chain(4)
    calls = (*trace.calls[:2], dataclasses.replace(trace.calls[2], replayable=False), trace.calls[3])
    trace = dataclasses.replace(trace, calls=calls)
    simulate(trace, recompute(("0", "1")))
    with pytest.raises(PlanError, match="'2' may not run twice"):
        simulate(trace, recompute(("1", "2")))


def test_a_plan_for_another_model_is_refused() -> None:
    plan = Plan((), "other", 1, 1, 1.0, 0.0, "none")
    with pytest.raises(PlanError, match="another model"):
        simulate(chain(2), plan)


def lines_run_for(blocks: int) -> int:
    trace, lines = block_chain(blocks, inner=5), 0
    regions = [PlannedRegion((f"b{i}",)) for i in range(blocks)]

    def count(_frame: object, event: str, _arg: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        result = simulate(trace, regions)
    finally:
        sys.settrace(before)
    assert len(result.moments) == 15 * blocks
    return lines


def test_work_grows_with_the_length_of_a_step_and_no_faster() -> None:
    assert lines_run_for(200) < 2.2 * lines_run_for(100)


def test_random_steps_conserve_time_and_never_go_below_the_plain_floor() -> None:
    for seed in range(50):
        trace = random_trace(random.Random(seed))
        result = simulate(trace, None)
        assert result.step_s == pytest.approx(sum(op.seconds for op in trace.ops))
        assert [m.op for m in result.moments] == list(range(len(trace.ops)))
