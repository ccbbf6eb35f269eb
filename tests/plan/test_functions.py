"""Calls of functions between modules as calls of a step that regions can have among their members."""

from __future__ import annotations

import dataclasses

import pytest

from lowtide._fit._suspects import without
from lowtide.errors import PlanError
from lowtide.plan import FunctionPath, Plan, PlannedRegion, replayable_regions, simulate, solve
from lowtide.plan._functions import with_function_calls, without_function_calls
from lowtide.plan._index import TraceIndex
from lowtide.records import Phase, StepTrace

from ._traces import MB, Writer


def meeting(*, between: bool = True) -> StepTrace:
    """``a`` makes 10 MB in 20 s, a function makes 40 MB of them, which ``b`` saves, both in ``m``. Then 60 MB are there for an op."""
    w = Writer()
    x = w.resident(MB)
    w.enter("m", [x])
    w.enter("m.a", [x])
    w.op(20.0, reads=[x])
    made = w.new(10 * MB)
    w.leave([made])
    start = len(w.ops)
    w.op(reads=[made])
    joined = w.new(40 * MB)
    if between:
        w.function("cat", start, joined)
    w.enter("m.b", [joined])
    w.op(reads=[joined])
    slot, out = w.save(joined), w.new(MB)
    w.leave([out])
    w.leave([out])
    w.free(made)
    w.free(joined)
    w.op(reads=[out])
    large = w.new(60 * MB)
    w.op(reads=[large])
    w.free(large)
    w.op(phase=Phase.BACKWARD)
    w.use(slot)
    w.op(phase=Phase.BACKWARD)
    w.release(slot)
    w.op(phase=Phase.BACKWARD)
    return w.trace()


def test_a_path_says_which_call_of_which_function_it_is() -> None:
    path = FunctionPath("up.0", "torch.nn.functional.fn.<locals>.silu", 2)
    assert FunctionPath.read(str(path)) == path
    assert FunctionPath.read(":cat[0]") == FunctionPath("", "cat", 0)
    for other in ("", "up.0", "up:0", "up:x[y]", "x[1]"):
        assert FunctionPath.read(other) is None


def test_a_call_between_modules_is_one_of_the_calls_in_its_place() -> None:
    trace = with_function_calls(meeting())
    assert [call.path for call in trace.calls] == ["m", "m.a", "m:cat[0]", "m.b"]
    found = trace.calls[2]
    assert (found.parent, found.start, found.end, found.inputs, found.outputs) == (0, 1, 2, (1,), (2,))
    assert [op.call for op in trace.ops[:3]] == [1, 2, 3]
    assert trace.saved[0].call == 3


def test_what_is_saved_where_two_calls_meet_is_of_the_one_that_it_was_saved_in() -> None:
    for at_end, path in [(True, "m:f[0]"), (False, "m:g[0]")]:
        w = Writer()
        x = w.resident(MB)
        w.enter("m", [x])
        w.enter("m.a", [x])
        w.op(reads=[x])
        first = w.new(MB)
        w.leave([first])
        w.op(reads=[first])
        second = w.new(MB)
        w.function("f", 1, second)
        slot = w.save(second)
        w.op(reads=[second])
        w.function("g", 2, w.new(MB))
        w.leave()
        trace = w.trace()
        trace = dataclasses.replace(trace, saved=(dataclasses.replace(trace.saved[slot], at_end=at_end),))
        shown = with_function_calls(trace)
        assert shown.calls[shown.saved[slot].call].path == path


def test_calls_are_counted_with_those_in_modules_inside_and_by_call_of_their_module() -> None:
    w = Writer()
    x = w.resident(MB)
    for _ in range(2):
        w.enter("m", [x])
        for path in ("m.a", "m.b"):
            w.enter(path, [x])
            w.op(reads=[x])
            w.function("f", len(w.ops) - 1, w.new(MB))
            w.leave()
            w.op(reads=[x])
            w.function("f", len(w.ops) - 1, w.new(MB))
        w.leave()
    paths = [call.path for call in with_function_calls(w.trace()).calls]
    assert paths == ["m", "m.a", "m:f[1]", "m.b", "m:f[3]"] * 2


def test_a_function_that_only_makes_a_view_is_none_of_them() -> None:
    w = Writer()
    x = w.resident(MB)
    w.enter("m", [x])
    w.enter("m.a", [x])
    w.op(reads=[x])
    made = w.new(MB)
    w.leave([made])
    w.op(reads=[made])
    w.function("view", 1, made)
    w.leave()
    assert [call.path for call in with_function_calls(w.trace()).calls] == ["m", "m.a"]


def test_a_function_is_replayed_without_what_made_its_inputs() -> None:
    trace, without = meeting(), meeting(between=False)
    assert simulate(trace, None).peak_bytes == simulate(without, None).peak_bytes
    plan, other = solve(trace, 80 * MB), solve(without, 80 * MB)
    assert plan.predicted_replay_s < 3 < 20 < other.predicted_replay_s
    assert "m:cat[0]" in [path for region in plan.regions for path in region.paths]
    assert plan.predicted_peak_bytes == simulate(trace, plan).peak_bytes
    left_out = without_function_calls(trace, {"m:cat[0]"})
    assert not TraceIndex(left_out).is_function.any()
    with pytest.raises(PlanError, match="cat"):
        simulate(left_out, plan)


def test_a_run_goes_no_further_than_the_module_that_calls_its_function() -> None:
    """What the engine has of it is let go of when that module is through."""
    w = Writer()
    x = w.resident(MB)
    w.enter("m", [x])
    w.enter("m.a", [x])
    w.op(reads=[x])
    made = w.new(MB)
    w.leave([made])
    w.op(reads=[made])
    last = w.new(MB)
    slots = [w.save(w.new(MB))]
    w.function("f", 1, last)
    w.leave([last])
    w.enter("n", [last])
    w.op(reads=[last])
    slots.append(w.save(last))
    w.leave([w.new(MB)])
    for storage in (made, last, w.saved[slots[0]][0]):
        w.free(storage)
    for slot in reversed(slots):
        w.op(phase=Phase.BACKWARD)
        w.use(slot)
        w.op(phase=Phase.BACKWARD)
        w.release(slot)
    regions = replayable_regions(w.trace())
    assert ("m:f[0]",) in regions
    assert ("m", "n") in regions
    assert not any("m:f[0]" in region and "n" in region for region in regions)


def test_a_function_of_a_region_that_fails_is_left_out_of_the_next_plan() -> None:
    trace = meeting()
    left = without(trace, (PlannedRegion(("m:cat[0]", "m.b")),))
    assert not TraceIndex(left).is_function.any()
    assert not any("m.b" in region for region in replayable_regions(left))


def test_plans_with_functions_come_back_from_json_and_know_what_is_inside_what() -> None:
    trace = meeting()
    region = PlannedRegion(("m:cat[0]", "m.b"))
    plan = Plan((region,), trace.fingerprint, 0, 0, 0.0, 0.0, "by hand")
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="overlap"):
        dataclasses.replace(plan, regions=(region, PlannedRegion(("m",))))
    around = PlannedRegion(("m",), inside=(region,))
    assert simulate(trace, [around]).peak_bytes > 0
