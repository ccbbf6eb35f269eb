"""``lowtide bench``: policies become plans, are measured in turns with the plain step, and leave nothing behind."""

from __future__ import annotations

import json
import sys

import pytest

from lowtide.cli._policies import plan_for, read_policies
from lowtide.cli._target import loaded
from lowtide.errors import BudgetError, InvalidInputError
from lowtide.plan import simulate
from lowtide.trace import trace


@pytest.fixture
def traced(script):
    path = script()
    with loaded(f"{path}:workload") as workload:
        return trace(workload.model, workload.step)


def paths(plan):
    return [region.paths for region in plan.regions]


def test_policies_become_plans(traced):
    assert paths(plan_for("none", traced)) == []
    assert paths(plan_for("full", traced)) == [(f"blocks.{i}",) for i in range(4)]
    assert paths(plan_for("every:2", traced)) == [("blocks.0",), ("blocks.2",)]
    assert paths(plan_for("every:9", traced)) == [("blocks.0",)]
    assert len(plan_for("sqrt", traced).regions) < 4
    before = simulate(traced, None).peak_bytes
    for policy, share in (("plan:70%", 0.7), ("plan: 90 %", 0.9)):
        assert plan_for(policy, traced).predicted_peak_bytes <= share * before
    assert plan_for(f"plan:{before}", traced).regions == ()
    assert plan_for("plan:60% of activations", traced).predicted_peak_bytes < before


@pytest.mark.parametrize("policy", ["none", "full", "every:2", "sqrt", "plan:70%"])
def test_a_plan_says_what_it_is_simulated_to_do(traced, policy):
    plan = plan_for(policy, traced)
    after = simulate(traced, plan)
    assert (plan.predicted_peak_bytes, plan.predicted_replay_s) == (after.peak_bytes, after.replay_s)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("many", "no policy 'many'"),
        ("every:0", "no policy"),
        ("none,every", "no policy 'every'"),
        ("", "names none"),
        ("plan:auto", "no budget of its own"),
    ],
)
def test_what_is_no_policy_is_refused(text, says):
    with pytest.raises(InvalidInputError, match=says):
        read_policies(text)


def test_a_budget_that_cannot_be_read_is_refused():
    with pytest.raises(BudgetError, match="0%"):
        read_policies("plan:0%")


def test_a_policy_is_read_once():
    assert read_policies(" none, full,none ,plan:1.5GiB") == ("none", "full", "plan:1.5GiB")


def test_rules_over_blocks_need_blocks(script):
    path = script(
        """
        def one():
            model, x = nn.Linear(8, 8), torch.randn(4, 8)
            return Workload(model, lambda: model(x).exp().sum().backward())
        """
    )
    with loaded(f"{path}:one") as workload, pytest.raises(InvalidInputError, match="no two modules of one class"):
        plan_for("full", trace(workload.model, workload.step))


def test_policies_are_measured_and_drawn(invoke, script, tmp_path):
    path = script("MODELS = []\ndef build():\n    found = workload()\n    MODELS.append(found.model)\n    return found")
    result = invoke("bench", f"{path}:build", "--policies", "none,full,plan:70%", "--steps", "2", "--plot", "bench.svg", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["policy"] for row in rows] == ["none", "full", "plan:70%"]
    none, full, plan = rows
    assert (none["time_ratio"], none["peak_ratio"], none["replay_s"]) == (1.0, 1.0, 0.0)
    for row in (full, plan):
        assert row["peak_ratio"] < 0.9
        assert row["peak_bytes"] < none["peak_bytes"]
        assert row["replay_s"] > 0
        assert row["tokens_per_s"] == pytest.approx(512 / row["step_s"])
    assert all(abs(row["peak_bytes"] - row["predicted_peak_bytes"]) < 0.1 * row["peak_bytes"] for row in rows)
    assert (tmp_path / "bench.svg").read_text().count("<circle") == 3
    (model,) = sys.modules[f"lowtide_target_{path.stem}"].MODELS
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_table_and_a_page(invoke, script, tmp_path):
    result = invoke("bench", f"{script()}:workload", "--policies", "none,every:2", "--steps", "1", "--plot", "bench.html")
    assert result.exit_code == 0, result.stderr
    assert "every:2" in result.stdout
    assert 'id="policies"' in (tmp_path / "bench.html").read_text()


def test_a_policy_is_refused_before_the_target_is_loaded(refused, script):
    target = str(script("raise AssertionError('loaded')")) + ":workload"
    assert "there is no policy 'half'" in refused("bench", target, "--policies", "half")
