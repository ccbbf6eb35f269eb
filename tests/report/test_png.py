"""The PNGs: no browser, one width, every chart, equal files; refused with the way to get them where they cannot be drawn."""

from __future__ import annotations

import struct
import sys

import pytest

from lowtide.errors import MissingExtraError
from lowtide.explain import explain
from lowtide.report import BenchRow, Subject, bench_png, fit_png, require_png, trace_png

matplotlib = pytest.importorskip("matplotlib", reason="PNGs need the extra png")


def size_of(png):
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


def colours_of(png):
    from io import BytesIO

    from matplotlib.image import imread

    pixels = (imread(BytesIO(png))[..., :3] * 255).round().astype(int)
    return {f"#{r:02x}{g:02x}{b:02x}" for r, g, b in {tuple(p) for p in pixels.reshape(-1, 3).tolist()}}


@pytest.fixture
def fit(make_fit):
    return make_fit(blocks=12, regions=[(f"blocks.{i}",) for i in range(0, 12, 3)])


def test_the_picture_of_a_fit_has_every_category_the_budget_and_the_replays(fit):
    png = fit_png(fit, Subject("gpt"))
    assert size_of(png)[0] == 1200
    assert {"#3d4f6b", "#4fa3a5", "#e8b04b", "#d9705a", "#b9a5d6", "#b3263a", "#6d5bd0"} <= colours_of(png)


def test_an_explained_fit_has_the_frontier_and_the_peak_as_well(fit):
    found = explain(fit.trace, time_limit_s=1)
    assert size_of(fit_png(fit, Subject("gpt"), found))[1] > size_of(fit_png(fit, Subject("gpt")))[1] + 300


def test_equal_reports_are_equal_files(fit):
    assert fit_png(fit, Subject("gpt")) == fit_png(fit, Subject("gpt"))


def test_a_trace_alone_has_no_budget_and_no_replays(fit):
    png = trace_png(fit.trace, Subject("gpt"), explain(fit.trace, time_limit_s=1))
    assert "#4fa3a5" in colours_of(png)
    assert not {"#b3263a", "#6d5bd0"} & colours_of(png)


def test_a_bench_has_a_point_a_policy(fit):
    rows = (BenchRow("none", 0, 10, fit.plain, 1.0, 1.0), BenchRow("full", 4, 8, fit.planned, 1.2, 0.7))
    assert size_of(bench_png(rows, Subject("gpt"))) == (1200, 636)


def test_nothing_global_of_matplotlib_is_touched(fit):
    fit_png(fit, Subject("gpt"))
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("lowtide.report._png.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'lowtide\[png\]'"):
        require_png()
