"""Explanations as tables, dictionaries and sections: nothing is lost on the way, and user text is shown as it is."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from lowtide.explain import explain, out_of_memory, peak, why_alive
from lowtide.measure import Measurement
from lowtide.plan import simulate
from lowtide.records import Category
from lowtide.report import (
    SECTIONS,
    BenchRow,
    Subject,
    alive_tables,
    bench_dict,
    bench_page,
    bench_svg,
    bench_table,
    explanation_dict,
    explanation_tables,
    fit_page,
    out_of_memory_table,
    trace_page,
    trace_summary_table,
)
from lowtide.report._charts import _boxes
from lowtide.report._marks import bench_marks
from lowtide.report._schedule import LANES, schedule

ROWS = (
    BenchRow("none", 0, 100 * 2**20, Measurement(101 * 2**20, 0.5, 0.01, 0.0, 5), 1.0, 1.0),
    BenchRow("plan:50%", 3, 50 * 2**20, Measurement(51 * 2**20, 0.6, 0.02, 0.1, 5), 1.2, 0.505),
)


@pytest.fixture
def trace(make_fit):
    return make_fit(blocks=6).trace


@pytest.fixture
def explanation(trace):
    return explain(trace, time_limit_s=1)


def text_of(table, width=120):
    out = StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_every_section_has_its_table(explanation):
    text = text_of(explanation_tables(explanation))
    for heading in ("peak 112.00 MiB", "saved tensors", "what replaying a module frees", "time against memory", "what would help"):
        assert heading in text
    assert explanation.advice.verdict.split(":")[0] in text
    assert "peak 112" not in text_of(explanation_tables(explanation, ["advice"]))


def test_alike_modules_share_a_line_and_their_bytes_add_up(explanation):
    line = next(line for line in text_of(explanation_tables(explanation, ["saved"])).splitlines() if "GeluBackward0" in line)
    assert "blocks.0 … blocks.5 (6)" in line
    assert "48.00 MiB" in line


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_to_the_width(explanation, width):
    for section in SECTIONS:
        assert max(map(len, text_of(explanation_tables(explanation, [section]), width).splitlines())) <= width


def test_the_dictionary_is_json_with_the_sections_that_were_asked_for(explanation):
    data = json.loads(json.dumps(explanation_dict(explanation), allow_nan=False))
    assert (data["format"], data["version"]) == ("lowtide.explanation", 1)
    assert data["peak"]["bytes"] == explanation.peak.bytes
    assert data["advice"]["remedies"][0]["remedy"] == explanation.advice.remedies[0].remedy.value
    assert len(data["saved"]["rows"]) == len(explanation.saved.rows)
    assert set(explanation_dict(explanation, ["peak"])) == {"format", "version", "peak"}


def test_lives_and_failures_have_tables(trace):
    assert "GeluBackward0" in text_of(alive_tables(why_alive(trace, "blocks.2")))
    assert "memory ran out" in text_of(out_of_memory_table(out_of_memory(trace, 90 * 2**20)))
    assert "112.00 MiB in forward" in text_of(trace_summary_table(trace, Subject("m"))) or "112.00 MiB in backward" in text_of(
        trace_summary_table(trace, Subject("m"))
    )


def test_the_treemap_is_all_of_the_peak(trace):
    top = peak(trace)
    boxes = {box.id: box for box in _boxes(top)}
    assert boxes["peak"].bytes == top.bytes
    for box in boxes.values():
        inside = [other.bytes for other in boxes.values() if other.parent == box.id]
        assert not inside or sum(inside) == box.bytes


def test_very_many_owners_become_a_few_boxes(trace):
    owner = peak(trace).owners[0]
    many = tuple(dataclasses.replace(owner, path=f"layer.{i}", category=Category.ACTIVATION) for i in range(5000))
    boxes = _boxes(dataclasses.replace(peak(trace), owners=many))
    assert len(boxes) < 2000
    assert boxes[0].bytes == 5000 * owner.bytes


def test_the_schedule_is_the_whole_step_without_overlap(make_fit):
    fit = make_fit(blocks=6)
    bars = schedule(fit.after, fit.trace)
    assert sum(bar.end_s - bar.start_s for bar in bars) == pytest.approx(fit.after.step_s)
    assert all(a.end_s <= b.start_s + 1e-12 for a, b in itertools.pairwise(bars))
    assert {bar.name for bar in bars if bar.lane == "replay"} == {"blocks.1", "blocks.2 … blocks.3"}
    assert {bar.lane for bar in bars} == set(LANES)
    assert sum(b.end_s - b.start_s for b in bars if b.lane == "replay") == pytest.approx(fit.after.replay_s)


def test_a_very_long_schedule_is_thinned_to_what_a_screen_can_show(make_fit):
    fit = make_fit(blocks=3000, regions=[(f"blocks.{i}",) for i in range(0, 3000, 2)])
    bars = schedule(fit.after, fit.trace)
    assert len(bars) < 2500
    assert max(bar.end_s for bar in bars) == pytest.approx(simulate(fit.trace, fit.plan).step_s)


def test_pages_have_the_sections_of_what_they_are_given(make_fit, explanation):
    fit = make_fit(blocks=6)
    plain, full, alone = (
        fit_page(fit, Subject("m")),
        fit_page(fit, Subject("m"), explanation),
        trace_page(fit.trace, Subject("m"), explanation),
    )
    ids = ["timeline", "regions", "schedule", "treemap", "alive", "saved"]
    assert [name for name in [*ids, "frontier", "causes", "advice"] if f'id="{name}"' in plain] == ids
    assert all(f'id="{name}"' in full for name in [*ids, "frontier", "causes", "advice"])
    assert all(f'id="{name}"' in alone for name in ["timeline", "schedule", "treemap", "alive", "saved", "frontier", "causes", "advice"])


def test_names_of_the_user_are_escaped(make_fit):
    trace = make_fit(blocks=3, regions=[("blocks.0",)]).trace
    evil = "<img src=x onerror=alert(1)>"
    calls = tuple(dataclasses.replace(call, path=f"{evil}.{i}", type=evil) for i, call in enumerate(trace.calls))
    changed = dataclasses.replace(trace, calls=calls)
    page = trace_page(changed, Subject(evil), explain(changed, time_limit_s=1))
    outside_of_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "<img" not in outside_of_scripts
    assert "<img src=x" not in "".join(re.findall(r"<script.*?</script>", page[page.index("<body>") :], flags=re.DOTALL))


def test_policies_side_by_side(tmp_path):
    text = text_of(bench_table(ROWS, Subject("m", 1000)), width=80)
    assert re.search(r"plan:50%\s+50.00 MiB\s+51.00 MiB\s+50.5%\s+600 ms ± 2%\s+1.200\s+16.7%", text)
    data = json.loads(json.dumps(bench_dict(ROWS, Subject("m")), allow_nan=False))
    assert [row["policy"] for row in data["rows"]] == ["none", "plan:50%"]
    picture = ElementTree.fromstring(bench_svg(ROWS, Subject("a < b")))
    points = [node for node in picture if node.tag.endswith("circle")]
    assert len(points) == 2
    assert float(points[0].get("cx")) > float(points[1].get("cx"))  # more memory lies to the right
    assert float(points[0].get("cy")) > float(points[1].get("cy"))  # less time lies lower
    assert 'id="policies"' in bench_page(ROWS, Subject("m"))


def test_policies_are_drawn_by_what_they_took_beside_the_plain_step():
    slow_by_then = dataclasses.replace(ROWS[0], measured=dataclasses.replace(ROWS[0].measured, step_s=0.9))
    none, plan = bench_marks((slow_by_then, ROWS[1]))
    assert plan.step_s == pytest.approx(1.2 * none.step_s)
