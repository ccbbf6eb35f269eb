"""The report in a real browser: it draws, hovers, asks for nothing, and has nothing to complain about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from lowtide.report import Losses, Subject, fit_page

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
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
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
    assert found["width"] > width / 2
    assert found["height"] > 400
    assert "aten.gelu.default" in found["hover"]
    assert "blocks.1" in found["hover"]
    assert "net.py:11" in found["hover"]
    assert re.search(r'<table id="regions">(.*?)</table>', document, re.DOTALL)[1].count("<tr>") == 1 + 30


def test_a_complaint_of_the_browser_would_be_noticed(make_fit, browse):
    _, console = browse(fit_page(make_fit(), Subject("gpt")).replace("</body>", '<img src="https://example.com/a.png"></body>'), 1200)
    assert any("Content Security Policy" in line for line in console)
