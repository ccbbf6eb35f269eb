"""Plans as files: what is written is read back, and every kind of damage is named."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from lowtide.errors import PlanError
from lowtide.plan import KeptCall, Plan, PlannedRegion
from lowtide.records import Decision


def some_plan() -> Plan:
    return Plan(
        regions=(
            PlannedRegion(("blocks.0", "blocks.1")),
            PlannedRegion(("blocks.2",), kept=(KeptCall("blocks.2.mlp", "torch.matmul", 1),)),
            PlannedRegion(("head",), Decision.KEEP),
        ),
        fingerprint="abc",
        budget_bytes=2**40,
        predicted_peak_bytes=2**40 - 1,
        predicted_step_s=0.1,
        predicted_replay_s=1 / 3,
        solver="whole-region",
        status="optimal",
        gap=None,
        device="cuda:0",
        torch_version="2.13.0",
    )


def test_a_saved_plan_is_read_back_equal(tmp_path) -> None:
    path = tmp_path / "plan.json"
    some_plan().save(path)
    assert Plan.load(path) == some_plan()
    assert Plan.from_json(some_plan().to_json()) == some_plan()
    assert json.loads(path.read_text())["version"] == 4


def test_a_file_from_before_regions_dropped_their_first_tensors_alone_is_read() -> None:
    data = json.loads(some_plan().to_json()) | {"version": 3}
    for region in data["regions"]:
        del region["first_saved"]
    assert Plan.from_json(json.dumps(data)) == some_plan()


def test_how_many_saved_tensors_are_dropped_is_read_back_equal() -> None:
    plan = dataclasses.replace(some_plan(), regions=(PlannedRegion(("a", "b"), first_saved=3),))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "more",
    [{"first_saved": 0}, {"first_saved": 1, "kept": (KeptCall("a", "f", 0),)}, {"first_saved": 1, "inside": (PlannedRegion(("a.0",)),)}],
)
def test_first_saved_tensors_that_make_no_sense(more) -> None:
    with pytest.raises(PlanError, match="only its first saved tensors"):
        PlannedRegion(("a", "b"), **more)


def test_a_file_from_before_regions_had_regions_inside_is_read() -> None:
    data = json.loads(some_plan().to_json()) | {"version": 2}
    for region in data["regions"]:
        del region["inside"], region["first_saved"]
    assert Plan.from_json(json.dumps(data)) == some_plan()


def test_regions_inside_regions_are_read_back_equal() -> None:
    inner = PlannedRegion(("a.0", "a.1"), inside=(PlannedRegion(("a.0",)),))
    plan = dataclasses.replace(some_plan(), regions=(PlannedRegion(("a", "b"), inside=(inner, PlannedRegion(("b",)))),))
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("inside", "message"),
    [
        ((PlannedRegion(("a", "b")),), "has itself inside"),
        ((PlannedRegion(("c",)),), "'c' is not"),
        ((PlannedRegion(("a",)), PlannedRegion(("a.0",))), "'a.0' lies inside 'a'"),
        ((PlannedRegion(("a",), Decision.KEEP),), "only replays nest"),
        ((PlannedRegion(("a",), kept=(KeptCall("a", "f", 0),)),), "regions inside and kept calls"),
        ((PlannedRegion(("a",), first_saved=1),), "regions inside and kept calls or tensors"),
    ],
)
def test_regions_inside_that_make_no_sense(inside, message) -> None:
    with pytest.raises(PlanError, match=message):
        PlannedRegion(("a", "b"), inside=inside)


def test_a_file_from_before_calls_were_kept_is_read() -> None:
    data = json.loads(some_plan().to_json()) | {"version": 1}
    for region in data["regions"]:
        del region["kept"], region["inside"], region["first_saved"]
    old = Plan.from_json(json.dumps(data))
    assert [region.paths for region in old.regions] == [region.paths for region in some_plan().regions]
    assert not any(region.kept for region in old.regions)


def test_saving_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("x" * 100_000)
    some_plan().save(str(path))
    assert Plan.load(path) == some_plan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_saved_plan_may_be_read_as_any_new_file(tmp_path) -> None:
    (tmp_path / "other").touch()
    some_plan().save(tmp_path / "plan.json")
    assert (tmp_path / "plan.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "plan.json"
    some_plan().save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanError, match="No space left"):
        some_plan().save(path)
    assert os.listdir(tmp_path) == ["plan.json"]
    assert Plan.load(path) == some_plan()


def test_a_file_that_cannot_be_written_is_named(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"cannot write the plan to .*nowhere.*No such file"):
        some_plan().save(tmp_path / "nowhere" / "plan.json")


def changed(**fields: object) -> str:
    data = json.loads(some_plan().to_json())
    data.update(fields)
    return json.dumps(data)


def without(name: str) -> str:
    data = json.loads(some_plan().to_json())
    del data[name]
    return json.dumps(data)


DAMAGE = {
    "empty": ("", "not JSON"),
    "cut off": (some_plan().to_json()[:100], "not JSON"),
    "deeply nested": ("[" * 100_000, "not JSON"),
    "a list": ("[]", "a JSON object was required, found a list"),
    "another format": (changed(format="other"), "'other'"),
    "no format": ("{}", 'its "format" is None'),
    "a later version": (changed(version=5), "version 5, this lowtide reads versions 1 to 4"),
    "a version as text": (changed(version="1"), "version '1'"),
    "a version as truth": (changed(version=True), "version True"),
    "a field missing": (without("budget_bytes"), "'budget_bytes' is missing"),
    "a field too many": (changed(colour="red"), "unknown field 'colour'"),
    "bytes as text": (changed(budget_bytes="12"), "budget_bytes must be a whole number"),
    "bytes as a fraction": (changed(predicted_peak_bytes=1.5), "predicted_peak_bytes must be a whole number"),
    "negative bytes": (changed(budget_bytes=-1), "budget_bytes must be a whole number, not negative, found -1"),
    "bytes as truth": (changed(budget_bytes=True), "budget_bytes"),
    "time that is no number": (changed(predicted_step_s=float("nan")), "predicted_step_s must be a number"),
    "time as null": (changed(predicted_replay_s=None), "predicted_replay_s must be a number, not negative, found null"),
    "gap as text": (changed(gap="small"), "gap must be a number"),
    "a name as a number": (changed(solver=3), "solver must be text, found 3"),
    "an unknown status": (changed(status="great"), "'great'"),
    "regions as an object": (changed(regions={}), "regions must be a list, found an object"),
    "a region as text": (changed(regions=["a"]), "region 0 of the plan must be an object"),
    "a region without decision": (changed(regions=[{"paths": ["a"]}]), "region 0 of the plan is damaged: the field 'decision' is missing"),
    "an unknown decision": (
        changed(regions=[{"paths": ["a"], "decision": "forget", "kept": [], "inside": [], "first_saved": None}]),
        "'forget', one of keep, recompute",
    ),
    "a decision of another type": (
        changed(regions=[{"paths": ["a"], "decision": ["keep"], "kept": [], "inside": [], "first_saved": None}]),
        "one of keep",
    ),
    "a kept call as text": (
        changed(regions=[{"paths": ["a"], "decision": "recompute", "kept": ["f"], "inside": [], "first_saved": None}]),
        "must be an object, found 'f'",
    ),
    "a kept call without index": (
        changed(
            regions=[
                {"paths": ["a"], "decision": "recompute", "kept": [{"module": "a", "function": "f"}], "inside": [], "first_saved": None}
            ]
        ),
        "the field 'index' is missing",
    ),
    "paths as text": (
        changed(regions=[{"paths": "a", "decision": "keep", "kept": [], "inside": [], "first_saved": None}]),
        "must be a list, found 'a'",
    ),
    "a path as a number": (
        changed(regions=[{"paths": [1], "decision": "keep", "kept": [], "inside": [], "first_saved": None}]),
        "a path of region 0",
    ),
    "no path": (changed(regions=[{"paths": [], "decision": "keep", "kept": [], "inside": [], "first_saved": None}]), "names no module"),
    "a path twice in a region": (
        changed(regions=[{"paths": ["a", "a"], "decision": "keep", "kept": [], "inside": [], "first_saved": None}]),
        "names a module twice",
    ),
    "a path in two regions": (
        changed(regions=[{"paths": ["a"], "decision": "keep", "kept": [], "inside": [], "first_saved": None}] * 2),
        "'a' is in two",
    ),
    "a region inside another": (
        changed(
            regions=[
                {"paths": ["a.b.c"], "decision": "keep", "kept": [], "inside": [], "first_saved": None},
                {"paths": ["a"], "decision": "keep", "kept": [], "inside": [], "first_saved": None},
            ]
        ),
        "'a.b.c' lies inside 'a'",
    ),
    "a region inside the root": (
        changed(
            regions=[
                {"paths": ["a"], "decision": "keep", "kept": [], "inside": [], "first_saved": None},
                {"paths": [""], "decision": "keep", "kept": [], "inside": [], "first_saved": None},
            ]
        ),
        "'a' lies inside ''",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_plan_is_refused_by_name_of_file_and_field(kind, tmp_path) -> None:
    text, message = DAMAGE[kind]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(PlanError, match=r"cannot read the plan .*none\.json: No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanError, match="directory"):
        Plan.load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\x80\x00\xff")
    with pytest.raises(PlanError, match="not text"):
        Plan.load(tmp_path / "binary")


def test_names_that_only_look_nested_are_allowed() -> None:
    plan = Plan((PlannedRegion(("a.b",)), PlannedRegion(("a.bc",)), PlannedRegion(("ab",))), "f", 1, 1, 1.0, 0.0, "x")
    assert Plan.from_json(plan.to_json()) == plan
