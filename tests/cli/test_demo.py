"""``lowtide demo`` on a transformer of a few kilobytes: its table, its files, and its status when anything differs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import pytest

from lowtide import Plan, fit
from lowtide.workloads import WORKLOADS, gpt

small = partial(gpt, blocks=2, width=32, context=64, batch=4, corpus_bytes=2**14)


@pytest.fixture(autouse=True)
def small_workload(monkeypatch):
    monkeypatch.setitem(WORKLOADS, "gpt", small)


def test_it_fits_trains_and_writes_everything_and_does_the_same_again(invoke, tmp_path):
    out = tmp_path / "new" / "folder"
    result, again = (invoke("demo", "--out", out, "--steps", 15) for _ in range(2))
    assert (result.exit_code, again.exit_code) == (0, 0), result.stderr + again.stderr
    rows = {line.strip().split("  ")[0]: line for line in result.stdout.splitlines()}
    for name in ("peak traced", "peak predicted", "peak measured", "step time", "tokens per second", "replayed share"):
        assert name in rows
    assert "bitwise equal" in rows["losses of 15 steps"]
    assert "bitwise equal" in rows["gradients"]
    assert Plan.load(out / "plan.json").regions
    assert "<table id=" in (out / "report.html").read_text()
    assert (out / "timeline.svg").read_text().startswith("<svg")
    for text in ("tracing", "verifying", "training 15 steps without", "training the same 15 steps with", str(out)):
        assert text in result.stderr
    losses = [re.findall(r"\d+\.\d+ → \d+\.\d+", run.stdout) for run in (result, again)]
    assert losses[0] == losses[1]
    first, last = map(float, losses[0][0].split(" → "))
    assert last < first, "the model did not learn"


@pytest.mark.filterwarnings("ignore:the plain step does not repeat itself")
def test_losses_that_differ_end_with_status_one(invoke, tmp_path, monkeypatch):
    runs = iter(range(10**6))

    def drifting():
        found = small()
        return replace(found, step=lambda: found.step() + next(runs) * 1e-3)

    monkeypatch.setitem(WORKLOADS, "gpt", drifting)
    result = invoke("demo", "--out", tmp_path, "--steps", 2)
    assert result.exit_code == 1, result.stderr
    assert "DIFFERENT" in result.stdout


def test_gradients_that_differ_end_with_status_one(invoke, tmp_path, monkeypatch):
    def spoilt(*arguments, **options):
        found = fit(*arguments, **options)
        return replace(found, verification=replace(found.verification, equal=False))

    monkeypatch.setattr("lowtide.cli._demo.fit", spoilt)
    result = invoke("demo", "--out", tmp_path, "--steps", 1)
    assert result.exit_code == 1, result.stderr
    assert "DIFFERENT" in result.stdout


def test_a_place_that_is_no_directory_is_refused(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot make the directory" in refused("demo", "--out", tmp_path / "file")
