"""``lowtide fit`` from end to end on a user's script: table, files, machine report, and refusals before any work."""

from __future__ import annotations

import json
import sys

import pytest

from lowtide import Plan
from lowtide.cli._target import loaded
from lowtide.policy import apply


@pytest.fixture
def target(script):
    return f"{script()}:workload"


def test_the_table_is_all_of_standard_output_and_the_files_are_written(invoke, target, tmp_path):
    result = invoke("fit", target, "--budget", "75%", "--plan", "plan.json", "--report", "report.html", "--decisions")
    assert result.exit_code == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines() if line.strip()]
    assert lines[0].startswith(f"{target.rsplit('/')[-1]} in ")
    names = ("budget", "peak traced", "peak predicted", "peak measured", "measured differs by", "step time", "tokens per second")
    rows = [line for line in lines if line.startswith((*names, "replayed share", "gradients"))]
    assert len(rows) == len(names) + 2
    assert "decisions" in lines
    assert "tracing" in result.stderr
    assert result.stderr.endswith("done\n")
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    with loaded(target) as workload:  # the plan applies to a model built anew
        handle = apply(workload.model, Plan.load(tmp_path / "plan.json"))
        workload.step()
        assert handle.replay_seconds() > 0
        handle.remove()


def test_the_machine_report_holds_to_the_budget_and_nothing_stays_installed(invoke, script, tmp_path):
    path = script("MODELS = []\ndef build():\n    found = workload()\n    MODELS.append(found.model)\n    return found")
    result = invoke("fit", f"{path}:build", "--budget", "75%", "--json", "--report", "timeline.svg")
    report = json.loads(result.stdout)
    assert report["target"] == f"{path}:build"
    assert report["plain"]["measured_peak_bytes"] > report["budget_bytes"] >= report["planned"]["measured_peak_bytes"]
    assert report["gradients"]["equal"]
    assert any(row["decision"] == "recompute" for row in report["regions"])
    assert report["plain"]["tokens_per_s"] > 0
    assert (tmp_path / "timeline.svg").read_text().startswith("<svg")
    (model,) = sys.modules[f"lowtide_target_{path.stem}"].MODELS
    assert all("forward" not in vars(module) for module in model.modules())
    assert not any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("budget", ["many", "", "-1", "0", "0%", "150%", "12 parsecs", "nan", "1e3GB"])
def test_a_budget_that_cannot_be_read_is_refused_before_the_target_is_loaded(refused, script, budget):
    path = script("raise AssertionError('loaded')")
    sentence = refused("fit", f"{path}:workload", f"--budget={budget}")
    assert budget in sentence


def test_a_budget_is_required(invoke, target):
    result = invoke("fit", target)
    assert result.exit_code == 2
    assert "--budget" in result.stderr


def test_an_infeasible_budget_says_what_would_fit_and_that_fits(invoke, refused, target):
    sentence = refused("fit", target, "--budget", "40KiB")
    assert "smallest budget that would fit" in sentence
    smallest = sentence.split("(")[-1].split(" bytes")[0]
    result = invoke("fit", target, "--budget", smallest)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("option", ["--plan", "--report"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(refused, script, option, tmp_path, monkeypatch):
    target = str(script("raise AssertionError('loaded')")) + ":workload"
    assert f"{option} no/such/file.json: there is no directory" in refused("fit", target, "--budget", "75%", option, "no/such/file.json")
    assert "is a directory" in refused("fit", target, "--budget", "75%", option, tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)
    assert "permission denied" in refused("fit", target, "--budget", "75%", option, "plan.json")
