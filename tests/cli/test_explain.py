"""``lowtide trace``, ``explain`` and ``report``: from a target or a file to tables, JSON and a page."""

from __future__ import annotations

import json

import pytest

from lowtide.explain import peak
from lowtide.records import StepTrace
from lowtide.report import SECTIONS


@pytest.fixture
def target(script):
    return f"{script()}:workload"


@pytest.fixture
def trace_file(invoke, target, tmp_path):
    result = invoke("trace", target, "--out", "trace.json")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "trace.json"


def test_a_trace_is_written_and_summed_up(invoke, target, tmp_path):
    result = invoke("trace", target, "--out", "trace.json")
    assert result.exit_code == 0, result.stderr
    trace = StepTrace.load(tmp_path / "trace.json")
    assert "peak" in result.stdout
    assert f"{len(trace.ops):,}" in result.stdout
    assert "tracing" in result.stderr


def test_a_trace_without_a_file_is_summed_up_for_machines(invoke, target):
    data = json.loads(invoke("trace", target, "--json").stdout)
    assert data["target"] == target
    assert data["peak_bytes"] == sum(data["categories"].values())
    assert data["ops"] > data["calls"] > 0


def test_a_step_is_traced_for_a_device_that_is_not_here(invoke, refused, target, tmp_path):
    result = invoke("trace", target, "--fake", "--device", "cuda", "--gpu", "h100", "--out", "cuda.json")
    assert result.exit_code == 0, result.stderr
    trace = StepTrace.load(tmp_path / "cuda.json")
    assert trace.device.startswith("cuda")
    assert trace.fake
    assert all(storage.bytes % 512 == 0 for storage in trace.storages)
    assert invoke("explain", "cuda.json", "--section", "advice", "--time-limit", "1").exit_code == 0
    assert "fake" in refused("trace", target, "--device", "cuda")


def test_what_autograd_saves_can_be_kept_off_the_device(invoke, target):
    plain, away = (json.loads(invoke("trace", target, "--json", *options).stdout) for options in ((), ("--offload",)))
    assert away["peak_bytes"] == plain["peak_bytes"]


def test_a_file_and_its_target_are_explained_alike(invoke, target, trace_file):
    of_file = json.loads(invoke("explain", trace_file, "--json", "--time-limit", "1").stdout)
    of_target = json.loads(invoke("explain", target, "--json", "--time-limit", "1").stdout)
    assert of_file["peak"]["bytes"] == of_target["peak"]["bytes"] == peak(StepTrace.load(trace_file)).bytes
    assert set(of_file) == {"format", "version", *SECTIONS}
    rows = [{key: row[key] for key in ("path", "node", "bytes")} for row in of_file["saved"]["rows"]]
    assert rows == [{key: row[key] for key in ("path", "node", "bytes")} for row in of_target["saved"]["rows"]]


def test_sections_are_chosen(invoke, trace_file):
    result = invoke("explain", trace_file, "--section", "peak", "-s", "advice", "--time-limit", "1")
    assert result.exit_code == 0, result.stderr
    assert "what would help" in result.stdout
    assert "saved tensors" not in result.stdout
    data = json.loads(invoke("explain", trace_file, "-s", "saved", "--json", "--time-limit", "1").stdout)
    assert set(data) == {"format", "version", "saved"}


def test_a_section_that_is_none_is_refused_before_any_work(refused, script):
    target = str(script("raise AssertionError('loaded')")) + ":workload"
    assert "there is no section 'peek'" in refused("explain", target, "--section", "peek")
    assert "cannot read 'lots' as a number of bytes" in refused("explain", target, "--limit", "lots")


def test_why_a_storage_lives(invoke, refused, trace_file):
    result = invoke("explain", trace_file, "--why", "blocks.1")
    assert "GeluBackward0" in result.stdout
    (first, *_) = json.loads(invoke("explain", trace_file, "--why", "blocks.1", "--json").stdout)["alive"]
    (again,) = json.loads(invoke("explain", trace_file, "--why", first["storage"], "--json").stdout)["alive"]
    assert again == first
    assert "calls no module 'nowhere'" in refused("explain", trace_file, "--why", "nowhere")


def test_where_memory_would_run_out(invoke, trace_file):
    top = peak(StepTrace.load(trace_file)).bytes
    assert "memory ran out at aten." in " ".join(invoke("explain", trace_file, "--limit", str(top - 1)).stdout.split())
    assert invoke("explain", trace_file, "--limit", str(top)).stdout.startswith("the step fits")
    data = json.loads(invoke("explain", trace_file, "--limit", str(top // 2), "--json").stdout)["out_of_memory"]
    assert data["alive_bytes"] <= top // 2 < data["alive_bytes"] + data["asked_bytes"]


def test_a_report_is_written_from_a_file(invoke, trace_file, tmp_path):
    result = invoke("report", trace_file, "--out", "report.html", "--time-limit", "1")
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert all(f'id="{name}"' in page for name in ("timeline", "treemap", "saved", "frontier", "causes", "advice", "schedule"))
    assert result.stdout.startswith("A peak of ")


def test_a_report_is_a_picture_where_its_name_says_so(invoke, refused, trace_file, tmp_path):
    pytest.importorskip("matplotlib", reason="PNGs need the extra png")
    result = invoke("report", trace_file, "--out", "report.png", "--time-limit", "1")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "let the name end in .html or .png" in refused("report", trace_file, "--out", "report.gif")


@pytest.mark.parametrize("command", [("explain",), ("report",)])
def test_a_file_that_is_no_trace_is_refused(refused, tmp_path, command, script):
    script(net=False)
    (tmp_path / "other.json").write_text('{"format": "recipe"}')
    assert "not a trace" in refused(*command, "other.json")
    assert "nowhere.json" in refused(*command, "nowhere.json")


@pytest.mark.parametrize("command", [("trace", "--out"), ("report", "--out")])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(refused, script, command):
    target = str(script("raise AssertionError('loaded')")) + ":workload"
    name, option = command
    assert "there is no directory" in refused(name, target, option, "no/such/file")
