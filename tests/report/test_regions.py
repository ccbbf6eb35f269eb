"""The table of decisions has every module once, and its bytes add up to what the simulation says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.plan import simulate
from lowtide.records import Call, Category, Decision, Phase
from lowtide.report import decided
from lowtide.report._tables import grouped

MIB = 2**20


def rows_of(fit):
    return decided(fit.trace, fit.plan, fit.after)


def held_after_forward(fit, simulation):
    last = [m for m in simulation.moments if m.phase == "forward"][-1]
    return last.live_bytes[list(Category).index(Category.ACTIVATION)]


def test_every_block_is_in_one_row_in_forward_order(make_fit):
    rows = rows_of(make_fit(regions=[("blocks.1",), ("blocks.2", "blocks.3")]))
    assert [row.name for row in rows] == ["blocks.0", "blocks.1", "blocks.2 … blocks.3", "blocks.4", "blocks.5"]
    assert [row.decision for row in rows] == [Decision.KEEP, Decision.RECOMPUTE, Decision.RECOMPUTE, Decision.KEEP, Decision.KEEP]
    assert [row.type for row in rows] == ["Block", "Block", "2 × Block", "Block", "Block"]


@pytest.mark.parametrize("regions", [[("blocks.0",)], [("blocks.1",), ("blocks.3",)], [("blocks.1", "blocks.2", "blocks.3")], []])
def test_freed_bytes_are_what_is_gone_at_the_end_of_forward(make_fit, regions):
    fit = make_fit(regions=regions)
    freed = sum(row.freed_bytes for row in rows_of(fit))
    assert freed == held_after_forward(fit, fit.before) - held_after_forward(fit, fit.after)
    assert (freed > 0) == bool(regions)


def test_a_segment_frees_what_passes_between_its_members(make_fit):
    apart = rows_of(make_fit(regions=[("blocks.1",), ("blocks.2",)]))
    together = rows_of(make_fit(regions=[("blocks.1", "blocks.2")]))
    assert sum(row.freed_bytes for row in apart) == 16 * MIB
    assert sum(row.freed_bytes for row in together) == 24 * MIB


def test_saved_bytes_count_each_storage_once(make_fit):
    fit = make_fit()
    saved = {tensor.storage for tensor in fit.trace.saved}
    assert sum(row.saved_bytes for row in rows_of(fit)) == sum(
        s.bytes for i, s in enumerate(fit.trace.storages) if i in saved and not s.resident
    )


def test_replay_seconds_are_those_of_the_simulation(make_fit):
    fit = make_fit()
    rows = rows_of(fit)
    assert sum(row.replay_s for row in rows) == pytest.approx(fit.after.replay_s)
    assert all((row.replay_s > 0) == (row.decision is Decision.RECOMPUTE) for row in rows)


def test_what_is_saved_outside_any_module_has_its_own_row(make_fit):
    fit = make_fit()
    moved = tuple(replace(tensor, call=None) if tensor.call == 6 else tensor for tensor in fit.trace.saved)
    trace = replace(fit.trace, saved=moved)
    rows = decided(trace, fit.plan, simulate(trace, fit.plan))
    assert (rows[-1].paths, rows[-1].name, rows[-1].saved_bytes) == ((), "outside any module", 16 * MIB)


def test_a_module_around_a_region_is_opened_and_keeps_a_row_for_its_own_tensors(make_fit):
    fit = make_fit(regions=[("blocks.1",)])
    calls = (*fit.trace.calls[:1], Call("stem", "Stem", 0, 0, 2, (), ()), *fit.trace.calls[1:])
    calls = tuple(replace(c, parent=0) if c.path != "blocks.0" else replace(c, path="stem.block", parent=1) for c in calls[1:])
    calls = (fit.trace.calls[0], *calls)
    ops = tuple(replace(op, call=None if op.call is None else op.call + 1) for op in fit.trace.ops)
    saved = tuple(replace(t, call=1 if t.call == 1 else t.call + 1) for t in fit.trace.saved)
    trace = replace(fit.trace, calls=calls, ops=ops, saved=saved)
    whole = decided(trace, fit.plan, simulate(trace, fit.plan.regions))
    assert [row.name for row in whole][:2] == ["stem", "blocks.1"]
    inner = replace(fit.plan, regions=(replace(fit.plan.regions[0], paths=("stem.block",)),))
    opened = decided(trace, inner, simulate(trace, inner.regions))
    assert [(row.name, row.decision) for row in opened][:2] == [
        ("stem, own ops", Decision.KEEP),
        ("stem.block", Decision.RECOMPUTE),
    ]


def test_equal_neighbours_share_a_line(make_fit):
    fit = make_fit(blocks=9, regions=[("blocks.3",), ("blocks.4",), ("blocks.5",)])
    rows = list(grouped(rows_of(fit)))
    assert [(row.name, row.type) for row in rows] == [
        ("blocks.0 … blocks.2", "3 × Block"),
        ("blocks.3 … blocks.5", "3 × Block"),
        ("blocks.6 … blocks.8", "3 × Block"),
    ]
    assert sum(row.replay_s for row in rows) == pytest.approx(fit.after.replay_s)


def test_three_thousand_regions_are_shown(make_fit):
    fit = make_fit(blocks=3000, regions=[(f"blocks.{i}",) for i in range(0, 3000, 2)])
    assert len(rows_of(fit)) == 3000
    assert {op.phase for op in fit.trace.ops} == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
