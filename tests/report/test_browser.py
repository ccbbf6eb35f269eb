"""The report in a real browser: it draws, hovers, asks for nothing, and has nothing to complain about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from lowtide.explain import explain
from lowtide.report import Losses, Subject, fit_page, trace_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")

# Run in the page once the plot is drawn; what it finds is written where --dump-dom shows it.
PROBE = """
<script>
const plot = document.getElementById("timeline");
plot.on("plotly_afterplot", () => {
  if (document.getElementById("found")) return;
  const found = document.createElement("pre");
  found.id = "found";
  document.body.append(found);
  const total = plot.data.findIndex(trace => trace.name === "total");
  Plotly.Fx.hover(plot, [{curveNumber: total, pointNumber: 3}], "xy");
  found.textContent = JSON.stringify({
    hover: [...plot.querySelectorAll(".hoverlayer text")].map(node => node.textContent).join("|"),
    areas: plot.querySelectorAll(".fills path, .fill path, path.js-fill").length,
    wide: document.documentElement.scrollWidth <= window.innerWidth,
    whole: (box => box.scrollWidth <= box.clientWidth)(document.getElementById("figures").parentElement),
    panels: plot.querySelectorAll(".subplot").length,
    width: plot.getBoundingClientRect().width,
    height: plot.getBoundingClientRect().height,
  });
});
Plotly.redraw(plot);
</script>
"""


@pytest.fixture
def browse(tmp_path):
    """Open a page in a window of so many points; the document as it is then, and what the console said."""

    def open_page(text, width, height=900):
        file = tmp_path / "report.html"
        file.write_text(text, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom"]
        command = [CHROMIUM, *options, f"--user-data-dir={tmp_path}/profile", f"--window-size={width},{height}", file.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return open_page


@pytest.mark.parametrize("width", [500, 900, 1600])
def test_the_report_draws_hovers_and_fits_the_window(make_fit, browse, width):
    page = fit_page(make_fit(blocks=30, regions=[(f"blocks.{i}",) for i in range(0, 30, 3)]), Subject("gpt", 4096, Losses((2.0,), (2.0,))))
    document, console = browse(page.replace("</body>", f"{PROBE}</body>"), width)
    assert console == []
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', document)[1])
    assert found["panels"] == 2
    assert found["areas"] >= 2 * 6
    assert found["wide"], "the page is wider than the window"
    assert found["whole"], "a column of the figures is cut off"
    assert found["width"] > width / 2
    assert found["height"] > 400
    assert "aten.gelu.default" in found["hover"]
    assert "blocks.1" in found["hover"]
    assert "net.py:11" in found["hover"]
    assert re.search(r'<table id="regions"[^>]*>(.*?)</table>', document, re.DOTALL)[1].count("<tr>") == 1 + 30


# Run once the page has loaded: every plot is hovered, the treemap is entered, and tables are sorted by click and by key.
ALL_PROBE = """
<script>
addEventListener("load", async () => {
  const later = ms => new Promise(done => setTimeout(done, ms));
  const hovered = async (name, points) => {
    const plot = document.getElementById(name);
    Plotly.Fx.hover(plot, points);
    await later(50);
    return [...plot.querySelectorAll(".hoverlayer text")].map(node => node.textContent).join("|");
  };
  const text = cell => cell.dataset.v ?? cell.textContent;
  const column = (name, number) => [...document.getElementById(name).tBodies[0].rows].map(row => text(row.cells[number]));
  const heading = (name, number) => document.getElementById(name).tHead.rows[0].cells[number];
  await later(1500);
  const found = {wide: document.documentElement.scrollWidth <= window.innerWidth};
  const frame = document.getElementById("frontier").getBoundingClientRect();
  const labels = [...document.querySelectorAll("#frontier .textpoint text")].map(node => node.getBoundingClientRect());
  found.labels = labels.length;
  found.labelsInside = labels.every(label => label.left >= frame.left && label.right <= frame.right);
  found.frontier = await hovered("frontier", [{curveNumber: 1, pointNumber: 0}]);
  const schedule = document.getElementById("schedule");
  found.bars = schedule.querySelectorAll(".bars .point").length;
  found.schedule = await hovered("schedule", [{curveNumber: 0, pointNumber: 1}]);
  const treemap = document.getElementById("treemap");
  found.boxes = treemap.querySelectorAll(".treemaplayer .slice").length;
  const box = [...treemap.querySelectorAll(".treemaplayer .slice")].find(node => node.textContent.includes("blocks"));
  box.querySelector("path").dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
  await later(200);
  found.treemap = [...treemap.querySelectorAll(".hoverlayer text")].map(node => node.textContent).join("|");
  found.before = column("saved", 5);
  heading("saved", 4).click();
  found.down = column("saved", 4);
  heading("saved", 4).click();
  found.up = column("saved", 4);
  found.sorted = heading("saved", 4).getAttribute("aria-sort");
  heading("regions", 0).dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
  found.words = column("regions", 0);
  found.figures = heading("figures", 1).tabIndex;
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
});
</script>
"""


@pytest.mark.parametrize("width", [500, 900, 1600])
def test_every_chart_is_drawn_and_hovers_and_tables_sort(make_fit, browse, width):
    fit = make_fit(blocks=12, regions=[(f"blocks.{i}",) for i in range(0, 12, 3)])
    page = fit_page(fit, Subject("gpt"), explain(fit.trace, time_limit_s=2))
    document, console = browse(page.replace("</body>", f"{ALL_PROBE}</body>"), width)
    assert console == []
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', document)[1]))
    assert found["wide"], "the page is wider than the window"
    assert found["labels"] >= 2
    assert found["labelsInside"], "a name beside a point is cut off at the edge"
    assert "this plan" in found["frontier"]
    assert "4 regions replayed" in found["frontier"]
    assert found["bars"] >= 12 + 12 + 1 + 12 + 4 + 12 + 1
    assert "blocks.1" in found["schedule"]
    assert "forward" in found["schedule"]
    assert found["boxes"] >= 12
    assert "of the peak" in found["treemap"]
    assert [float(v) for v in found["before"]] == sorted(map(float, found["before"]), reverse=True)
    assert [float(v) for v in found["down"]] == sorted(map(float, found["down"]), reverse=True)
    assert [float(v) for v in found["up"]] == sorted(map(float, found["up"]))
    assert found["sorted"] == "ascending"
    assert found["words"] == [f"blocks.{i}" for i in range(12)]
    assert found["figures"] == -1, "the table of figures has its own order"


@pytest.mark.parametrize("width", [500, 1600])
def test_the_report_of_a_trace_alone_is_drawn(make_fit, browse, width):
    trace = make_fit(blocks=8).trace
    document, console = browse(trace_page(trace, Subject("gpt"), explain(trace, time_limit_s=2)), width)
    assert console == []
    for name in ("timeline", "schedule", "treemap", "frontier"):
        assert re.search(rf'id="{name}"[^>]*class="[^"]*js-plotly-plot', document), name
    assert "What would help" in document


def test_a_complaint_of_the_browser_would_be_noticed(make_fit, browse):
    _, console = browse(fit_page(make_fit(), Subject("gpt")).replace("</body>", '<img src="https://example.com/a.png"></body>'), 1200)
    assert any("Content Security Policy" in line for line in console)
