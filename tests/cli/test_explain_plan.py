"""``lowtide explain-plan``, and the options of ``lowtide fit`` that say how to plan."""

from __future__ import annotations

import json

import pytest

from lowtide.plan import Plan


@pytest.fixture
def target(script):
    return f"{script()}:workload"


def test_a_plan_is_explained_region_by_region(invoke, target, tmp_path) -> None:
    plan = tmp_path / "plan.json"
    assert invoke("fit", target, "--budget", "80%", "--plan", plan).exit_code == 0
    shown = invoke("explain-plan", plan, target)
    assert shown.exit_code == 0, shown.stderr
    for text in ("why the plan decides so", "takes", "most for a byte"):
        assert text in shown.stdout
    found = json.loads(invoke("explain-plan", plan, target, "--json").stdout)
    assert found["regions"]
    assert found["peak_bytes"] < found["plain_peak_bytes"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--budget or --max-slowdown"),
        (("--budget", "50%", "--max-slowdown", "5%"), "--budget or --max-slowdown"),
        (("--max-slowdown", "fast"), "cannot read the slowdown"),
        (("--budget", "50%", "--solver", "magic"), "no solver 'magic'"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(refused, target, options, message) -> None:
    assert message in refused("fit", target, *options)


def test_a_slowdown_in_place_of_a_budget(invoke, target, tmp_path) -> None:
    plan = tmp_path / "plan.json"
    result = invoke("fit", target, "--max-slowdown", "40%", "--solver", "first-k", "--plan", plan)
    assert result.exit_code == 0, result.stderr
    assert Plan.load(plan).solver in ("first-k", "none")
