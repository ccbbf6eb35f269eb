"""A plan file is shown as a table; one that is damaged, of another version or for another model is refused."""

from __future__ import annotations

import json

import pytest

from lowtide.cli._target import loaded
from lowtide.plan import Plan, PlannedRegion
from lowtide.policy import fingerprint


@pytest.fixture
def target(script):
    return f"{script()}:workload"


@pytest.fixture
def plan(target, tmp_path):
    with loaded(target) as workload:
        made_for = fingerprint(workload.model)
    regions = (PlannedRegion(("blocks.0",)), PlannedRegion(("blocks.2", "blocks.3")))
    path = tmp_path / "plan.json"
    Plan(regions, made_for, 3 * 2**20, 2 * 2**20, 0.25, 0.05, "exact", "optimal", 0.0, "cpu", "2.13.0").save(path)
    return path


def test_a_plan_is_shown(invoke, plan):
    result = invoke("show-plan", plan)
    assert result.exit_code == 0, result.stderr
    for text in ("blocks.0", "blocks.2 … blocks.3", "recompute", "3.00 MiB", "2.00 MiB", "50 ms", "optimal"):
        assert text in result.stdout


def test_a_plan_is_checked_against_a_model(invoke, refused, plan, target, script):
    assert invoke("show-plan", plan, target).exit_code == 0
    other = script("def wider():\n    model = Net(width=32)\n    return Workload(model, print)")
    assert "made for another model" in refused("show-plan", plan, f"{other}:wider")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data | {"version": 99}, "has version 99"),
        (lambda data: data | {"format": "recipe"}, "not a plan"),
        (lambda data: {k: v for k, v in data.items() if k != "regions"}, "damaged"),
        (lambda data: data | {"regions": [{"paths": ["blocks.0"], "decision": "forget"}]}, "damaged"),
        (lambda data: [data], "not a plan"),
    ],
)
def test_a_plan_that_is_wrong_is_refused(refused, plan, change, says):
    plan.write_text(json.dumps(change(json.loads(plan.read_text()))))
    sentence = refused("show-plan", plan)
    assert says in sentence
    assert str(plan) in sentence


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"regions: []"])
def test_a_file_that_is_no_plan_is_refused(refused, plan, content):
    plan.write_bytes(content)
    assert str(plan) in refused("show-plan", plan)


def test_a_file_that_is_not_there_is_refused(refused, tmp_path):
    assert "No such file" in refused("show-plan", tmp_path / "none.json")
    assert "cannot read the plan" in refused("show-plan", tmp_path)
