"""``lowtide bench``: policies become plans, are measured in turns with the plain step, and leave nothing behind."""

from __future__ import annotations

import json
import sys

import pytest

from lowtide.cli._policies import made_for, read_policies
from lowtide.cli._target import loaded
from lowtide.errors import BudgetError, InvalidInputError, PolicyError
from lowtide.plan import simulate
from lowtide.policy import ENTRIES, apply, parse_policy
from lowtide.trace import trace


@pytest.fixture
def traced(script):
    path = script()
    with loaded(f"{path}:workload") as workload:
        return trace(workload.model, workload.step)


def test_a_budget_becomes_a_plan(traced):
    before = simulate(traced, None).peak_bytes
    for policy, share in (("plan:70%", 0.7), ("plan: 90 %", 0.9)):
        plan = made_for(parse_policy(policy), traced)
        assert plan.predicted_peak_bytes == simulate(traced, plan).peak_bytes <= share * before
    assert made_for(parse_policy(f"plan:{before}"), traced).regions == ()
    assert made_for(parse_policy("plan:60% of activations"), traced).predicted_peak_bytes < before


def test_what_is_cheap_is_found_in_the_trace(traced):
    before = simulate(traced, None)
    assert made_for(parse_policy("cheap"), traced).predicted_replay_s <= 0.02 * before.step_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("many", "no policy 'many'"),
        ("every:0", "no policy"),
        ("none,every", "write every:N"),
        ("ful", "did you mean full"),
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
    assert list(read_policies(" none, full,none ,plan:1.5GiB")) == ["none", "full", "plan:1.5GiB"]


def test_rules_over_blocks_need_blocks(script):
    path = script(
        """
        def one():
            model, x = nn.Linear(8, 8), torch.randn(4, 8)
            return Workload(model, lambda: model(x).exp().sum().backward())
        """
    )
    with loaded(f"{path}:one") as workload, pytest.raises(PolicyError, match="nothing repeats in Linear"):
        apply(workload.model, "full")


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
    for row in rows:
        assert abs(row["peak_bytes"] - row["predicted_peak_bytes"]) < 0.1 * row["peak_bytes"], rows
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


def test_policies_are_listed_with_a_line_each(invoke):
    result = invoke("policies")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line]
    assert [line.split()[0] for line in lines[: len(ENTRIES)]] == [entry.form for entry in ENTRIES]
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)
