"""Timelines keep what matters of a simulation: the peak to the byte, replays, and the names of what ran."""

from __future__ import annotations

import numpy as np
import pytest

from lowtide.plan import simulate
from lowtide.records import Category
from lowtide.report._timeline import labels, region_name, thinned, timeline


def test_rows_are_the_moments_with_their_bytes(make_fit):
    fit = make_fit()
    line = timeline(fit.after)
    assert len(line.start_s) == len(fit.after.moments)
    assert line.total_bytes.max() == fit.after.peak_bytes
    assert line.end_s == pytest.approx(fit.after.step_s)
    assert line.of(Category.PARAMETER).tolist() == [6 * 2**20] * len(line.start_s)


def test_thinning_keeps_the_peak_and_the_valleys(make_fit):
    fit = make_fit(blocks=300, regions=[(f"blocks.{i}",) for i in range(0, 300, 2)])
    line = timeline(fit.after)
    thin = thinned(line, 50)
    assert len(thin.start_s) <= 100 < len(line.start_s)
    assert thin.total_bytes.max() == line.total_bytes.max()
    assert thin.total_bytes.min() == line.total_bytes.min()
    assert (np.diff(thin.start_s) > 0).all()
    assert thin.replays == line.replays


def test_a_short_timeline_is_left_as_it_is(make_fit):
    line = timeline(make_fit().before)
    assert thinned(line, 1000) is line


def test_replays_are_intervals_named_by_their_region(make_fit):
    fit = make_fit(regions=[("blocks.1",), ("blocks.2", "blocks.3")])
    replays = timeline(fit.after).replays
    assert [interval.region for interval in replays] == [("blocks.2", "blocks.3"), ("blocks.1",)]
    assert sum(interval.end_s - interval.start_s for interval in replays) == pytest.approx(fit.after.replay_s)
    assert timeline(fit.before).replays == ()


def test_labels_name_op_module_line_and_phase(make_fit):
    fit = make_fit(regions=[("blocks.1",)])
    texts = labels(timeline(fit.after), fit.after, fit.trace)
    assert texts[0].split("\n") == ["aten.addmm.default", "blocks.0", "net.py:10", "forward"]
    assert next(text.split("\n") for text in texts if "replay" in text) == [
        "aten.addmm.default",
        "blocks.1",
        "net.py:11",
        "replay of blocks.1",
    ]
    assert texts[-1].split("\n") == ["aten._foreach_add_.List", "outside any module", "train.py:5", "optimizer"]


def test_a_step_without_ops_is_refused(make_fit):
    trace = make_fit().trace
    empty = simulate(type(trace)((), (), (), (), "", "cpu"), None)
    with pytest.raises(ValueError, match="at least one moment"):
        timeline(empty)


@pytest.mark.parametrize(("paths", "name"), [(("a.0",), "a.0"), (("a.0", "a.1"), "a.0 … a.1"), (("",), "(model)")])
def test_a_region_has_one_name(paths, name):
    assert region_name(paths) == name
