"""What people and machines are shown says what the fit found, and raises the alarm when it must."""

from __future__ import annotations

import json
import re
import struct
from io import StringIO
from xml.etree import ElementTree

import pytest
from rich.console import Console

from lowtide import report
from lowtide.report import Losses, Subject, decided, fit_page, fit_table, headline, plan_table, region_table, report_dict, timeline_svg

SUBJECT = Subject("gpt", 4096, Losses((5.5, 4.25), (5.5, 4.25)))


def text_of(table, width=120):
    out = StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


def test_the_table_has_every_main_figure(make_fit):
    text = text_of(fit_table(make_fit(), SUBJECT))
    rows = {cells[0]: cells[1:] for line in text.splitlines() if (cells := re.split(r" {2,}", line.strip()))}
    assert rows["peak traced"] == ["112.00 MiB"]
    assert rows["peak predicted"] == ["80.00 MiB", "71.4%"]
    assert rows["peak measured"] == ["112.00 MiB", "80.00 MiB", "71.4%"]
    assert rows["budget"] == ["81.00 MiB", "72.3% of traced"]
    assert rows["step time"][-1] == "1.070 ×"
    assert rows["tokens per second"][:2] == [f"{4096 / 0.0876:,.0f}", f"{4096 / 0.1026:,.0f}"]
    assert rows["replayed share"] == ["0.0%", "14.6%"]
    assert rows["gradients"] == ["42 tensors", "bitwise equal"]
    assert rows["losses of 2 steps"] == ["5.5000 → 4.2500", "5.5000 → 4.2500", "bitwise equal"]


def test_the_table_fits_eighty_columns_without_wrapping(make_fit):
    text = text_of(fit_table(make_fit(), SUBJECT), width=80)
    assert len(text.splitlines()) == 4 + len(report.figures(make_fit(), SUBJECT)) + 1


def test_rows_for_what_is_not_known_are_left_out(make_fit):
    names = [figure.name for figure in report.figures(make_fit(), Subject("m"))]
    assert "tokens per second" not in names
    assert not any("losses" in name for name in names)


def test_different_gradients_and_losses_raise_the_alarm(make_fit):
    fit = make_fit()
    bad = type(fit)(**{**vars(fit), "verification": type(fit.verification)(equal=False)})
    losses = Losses((1.0, 2.0), (1.0, 2.0000000000000004))
    alarming = [row.name for row in report.figures(bad, Subject("m", None, losses)) if row.alarming]
    assert alarming == ["gradients", "losses of 2 steps"]
    assert "DIFFERENT" in fit_page(bad, SUBJECT)


def test_a_step_that_does_not_repeat_itself_is_not_called_bitwise_equal(make_fit):
    fit = make_fit()
    noisy = type(fit)(**{**vars(fit), "verification": type(fit.verification)(repeatable=False)})
    (row,) = (row for row in report.figures(noisy, SUBJECT) if row.name == "gradients")
    assert (row.change, row.alarming) == ("within noise", False)


def test_a_step_that_does_not_fit_without_the_plan_is_not_compared_with_itself(make_fit):
    fit = make_fit(plain_fits=False)
    rows = {row.name: row for row in report.figures(fit, SUBJECT)}
    assert [rows[name].plain for name in ("peak measured", "step time", "tokens per second")] == ["does not fit", "does not fit", ""]
    assert not rows["step time"].change
    assert rows["peak measured"].change == "71.4%"
    assert "does not fit without the plan" in headline(fit)
    assert "traced peak without" in fit_page(fit, SUBJECT)
    assert report_dict(fit, SUBJECT)["plain_fits"] is False


def test_losses_are_compared_by_their_bits():
    nan = struct.unpack("d", struct.pack("d", float("nan")))[0]
    assert Losses((1.0, nan), (1.0, nan)).equal
    assert not Losses((0.0,), (-0.0,)).equal
    assert not Losses((1.0,), (1.0, 2.0)).equal
    assert not Losses((), ()).equal


def test_the_headline_says_when_the_budget_was_missed(make_fit):
    assert "within the budget of 81.00 MiB" in headline(make_fit())
    assert "over the budget of 1.00 MiB" in headline(make_fit(budget_bytes=2**20))


def test_tables_show_user_text_as_it_is(make_fit):
    fit = make_fit()
    assert "[red]x in" in text_of(fit_table(fit, Subject("[red]x")))
    assert "blocks.2 … blocks.3" in text_of(region_table(decided(fit.trace, fit.plan, fit.after)))
    text = text_of(plan_table(fit.plan, "plan [b].json"))
    assert "plan [b].json" in text
    assert "blocks.2 … blocks.3" in text


def test_the_machine_report_is_json_with_plain_numbers(make_fit):
    fit = make_fit()
    data = json.loads(json.dumps(report_dict(fit, SUBJECT), allow_nan=False))
    assert (data["format"], data["version"]) == (report.FORMAT, report.VERSION)
    assert data["planned"]["measured_peak_bytes"] == fit.planned.peak_bytes
    assert data["plain"]["predicted_peak_bytes"] == fit.before.peak_bytes
    assert data["gradients"] == {"compared": 42, "equal": True, "repeatable": True, "summary": fit.verification.summary}
    assert data["losses"] == {"plain": [5.5, 4.25], "planned": [5.5, 4.25], "equal": True}
    assert [row["decision"] for row in data["regions"]].count("recompute") == 2


def test_a_loss_that_is_no_number_is_null_in_the_machine_report(make_fit):
    losses = report_dict(make_fit(), Subject("m", None, Losses((float("inf"),), (float("nan"),))))["losses"]
    assert losses == {"plain": [None], "planned": [None], "equal": False}


def test_the_picture_is_well_formed_and_inside_its_frame(make_fit):
    picture = ElementTree.fromstring(timeline_svg(make_fit(blocks=40), Subject("a < b & c")))
    areas = [node for node in picture if node.tag.endswith("path") and node.get("d", "").endswith("Z")]
    assert len(areas) == 2 * 6 + 1  # six categories twice, and the replays of the second panel
    heights = [float(y) for node in areas for y in re.findall(r"V(-?[\d.]+)", node.get("d"))]
    assert 0 <= min(heights) <= max(heights) <= 640
    assert "a < b & c" in next(node.text for node in picture if node.tag.endswith("title"))


def test_the_picture_stays_small(make_fit):
    fit = make_fit(blocks=1500, regions=[(f"blocks.{i}",) for i in range(0, 1500, 2)])
    assert len(timeline_svg(fit, SUBJECT)) < 500_000


@pytest.mark.parametrize("blocks", [6, 1000])
def test_the_page_is_one_file_of_bounded_size_that_asks_for_nothing(make_fit, blocks):
    from plotly.offline import get_plotlyjs

    page = fit_page(make_fit(blocks=blocks), SUBJECT).replace(get_plotlyjs(), "")
    assert len(page) < 2_000_000
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "default-src 'none'" in page


def test_the_page_escapes_what_the_user_named(make_fit):
    page = fit_page(make_fit(), Subject("<script>alert(1)</script>"))
    assert "<script>alert(1)" not in page


def test_the_surface_is_what_is_listed():
    assert all(hasattr(report, name) for name in report.__all__)
