"""The sections of a report that explain a step: each is made from a trace alone, whatever was or was not fitted to it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from lowtide.report._charts import schedule_figure, tradeoff_figure, treemap_figure
from lowtide.report._marks import Mark, frontier_marks
from lowtide.report._page import Section
from lowtide.report._palette import CATEGORY_COLOURS, REPLAY_SHADE
from lowtide.report._plot import timeline_figure
from lowtide.report._timeline import STACK_ORDER
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.explain import AdviceReport, FrontierPoint, Peak, RegionReplay, SavedTable
    from lowtide.plan import Simulation
    from lowtide.records import StepTrace

_PLOT_OPTIONS = {"responsive": True, "displayModeBar": False}
_MOST_ROWS = 400
_MOST_ALIVE = 60


def figure_html(figure: Any, name: str) -> str:
    """A plotly figure as HTML, without plotly.js."""
    from plotly.io import to_html

    return str(to_html(figure, full_html=False, include_plotlyjs=False, config=_PLOT_OPTIONS, div_id=name))


def table(name: str, headings: Iterable[tuple[str, bool]], rows: Iterable[str], *, sortable: bool = False) -> str:
    """A table that scrolls by itself; headings come with whether their column holds numbers."""
    head = "".join(f"<th class=n>{escape(text)}</th>" if number else f"<th>{escape(text)}</th>" for text, number in headings)
    look = ' class="sortable"' if sortable else ""
    body = "".join(rows)
    return f'<div class="scroll"><table id="{name}"{look}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def breakable(path: str) -> str:
    """A module path that a browser breaks after its dots, where a line gets too long."""
    return escape(path).replace(".", ".<wbr>")


def number(text: str, value: float) -> str:
    """A cell with a number as people read it, and as a table is sorted by it."""
    return f'<td class="n" data-v="{value:g}">{escape(text)}</td>'


def size(count: int) -> str:
    """A cell with bytes."""
    return f'<td class="n" data-v="{count}">{format_bytes(count)}</td>'


def code(path: str) -> str:
    """A cell with a module path, a node or a line."""
    return f"<td><code>{breakable(path)}</code></td>"


def timeline_section(sides: dict[str, Simulation], trace: StepTrace, budget_bytes: int | None = None) -> Section:
    """Live bytes over time."""
    plot = figure_html(timeline_figure(sides, trace, budget_bytes), "timeline")
    note = (
        "Bytes alive at each moment of one step, stacked by what they are for; the line is their sum. "
        "Point at a moment to see the op that ran then and where it was called; drag to zoom, double-click to go back."
    )
    look = "plot" if len(sides) > 1 else "plot half"
    return Section("Timeline", f'{_legend(replays=len(sides) > 1)}<div class="{look}">{plot}</div>', note)


def _legend(*, replays: bool) -> str:
    """In HTML rather than in the plot, so that it wraps on a narrow screen."""
    swatches = [(CATEGORY_COLOURS[category], category.value) for category in STACK_ORDER]
    swatches += [(REPLAY_SHADE, "replay")] if replays else []
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for colour, name in swatches)
    return f'<ul class="legend">{items}</ul>'


def schedule_section(sides: dict[str, Simulation], trace: StepTrace) -> Section:
    """What runs when."""
    plot = figure_html(schedule_figure(sides, trace), "schedule")
    look = "plot half" if len(sides) > 1 else "plot strip"
    return Section(
        "Schedule", f'<div class="{look}">{plot}</div>', "Which part of the model runs when, by phase; point at a bar for its name."
    )


def peak_section(peak: Peak) -> Section:
    """What the peak is made of: a treemap, and the largest storages."""
    treemap = f'<div class="plot half">{figure_html(treemap_figure(peak), "treemap")}</div>'
    headings = [("owner", False), ("made by", False), ("for", False), ("because", False), ("bytes", True)]
    rows = [
        f'<tr>{code(s.owner)}<td title="{escape(s.source)}">{escape(s.made_by or "—")}</td><td>{escape(s.category.value)}</td>'
        f'<td title="{escape(", ".join(s.nodes))}">{escape(s.because)}</td>{size(s.bytes)}</tr>'
        for s in peak.storages[:_MOST_ALIVE]
    ]
    line = f", {peak.source}" if peak.source else ""
    note = (
        f"{format_bytes(peak.bytes)} at {peak.op_name} in {peak.phase.value} ({peak.path}{line}), {format_seconds(peak.start_s)} into the "
        f"step. Click a box to look inside. Below, the largest of {len(peak.storages)} storages alive then."
    )
    return Section("Peak by module", treemap + table("alive", headings, rows, sortable=True), note)


def saved_section(saved: SavedTable) -> Section:
    """The saved-tensor table, with what is shared and what is kept twice."""
    headings = [("module", False), ("node", False), ("dtype", False), ("tensors", True), ("bytes", True), ("storage kept", True)]
    rows = [
        f"<tr>{code(r.path)}{code(r.node)}<td>{escape(r.dtype or '—')}</td>{number(str(r.tensors), r.tensors)}{size(r.bytes)}"
        f"{size(r.storage_bytes)}</tr>"
        for r in saved.rows[:_MOST_ROWS]
    ]
    shown = f"The {_MOST_ROWS} largest of {len(saved.rows)} rows. " if len(saved.rows) > _MOST_ROWS else ""
    twice = sum(pair.copy_bytes for pair in saved.twice)
    again = f" {format_bytes(twice)} are kept a second time in another dtype." if twice else ""
    shared = f"{len(saved.shared)} storages have several savers." if len(saved.shared) != 1 else "One storage has several savers."
    note = (
        f"{saved.tensors} tensors that autograd saved; they keep {format_bytes(saved.storage_bytes)} of storage, each counted where it was "
        f"saved first. {shared}{again} {shown}Click a heading to sort."
    )
    return Section("Saved tensors", table("saved", headings, rows, sortable=True) + _twice(saved), note)


def _twice(saved: SavedTable) -> str:
    if not saved.twice:
        return ""
    headings = [("cast in", False), ("line", False), ("from", False), ("to", False), ("original", True), ("copy", True)]
    rows = [
        f"<tr>{code(p.path)}{code(p.source)}<td>{escape(p.dtypes[0] or '—')}{' (parameter)' if p.of_parameter else ''}</td>"
        f"<td>{escape(p.dtypes[1] or '—')}</td>{size(p.original_bytes)}{size(p.copy_bytes)}</tr>"
        for p in saved.twice[:_MOST_ROWS]
    ]
    return "<h3>Kept in two dtypes</h3>" + table("twice", headings, rows, sortable=True)


def causes_section(regions: tuple[RegionReplay, ...]) -> Section:
    """What each module's replay frees, or why it frees nothing."""
    headings = [
        ("module", False),
        ("class", False),
        ("saved", True),
        ("freed", True),
        ("peak falls", True),
        ("replay", True),
        ("why not", False),
    ]
    rows = [
        f'<tr><td title="{escape(", ".join(r.paths))}"><code>{breakable(r.name)}</code></td><td>{escape(r.type)}</td>{size(r.saved_bytes)}'
        f"{size(r.freed_bytes)}{size(r.peak_fall_bytes)}{number(format_seconds(r.replay_s), r.replay_s)}<td>{_reasons(r)}</td></tr>"
        for r in regions
    ]
    note = (
        "Each row is what would come of replaying these modules, each as a region of its own, and nothing else. "
        "Where that lowers the peak, nothing needs explaining."
    )
    return Section("What replays free", table("causes", headings, rows, sortable=True), note)


def _reasons(region: RegionReplay) -> str:
    return "".join(f'<div class="why"><b>{escape(r.cause.value)}</b> {escape(r.text)}</div>' for r in region.reasons)


def advice_section(report: AdviceReport) -> Section:
    """What would help, ranked, under the verdict."""
    headings = [("remedy", False), ("what", False), ("peak falls", True), ("peak left", True), ("time added", True), ("how", False)]
    rows = [
        f"<tr><td>{escape(a.remedy.value)}</td><td>{breakable(a.title)}</td>{size(a.saves_bytes)}{size(a.peak_bytes)}"
        f"{number(format_seconds(a.adds_s) if a.adds_s else '≈ 0', a.adds_s)}<td>{escape(a.how)}</td></tr>"
        for a in report.remedies
    ]
    return Section("What would help", table("advice", headings, rows, sortable=True), _sentence(report.verdict))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def frontier_section(points: tuple[FrontierPoint, ...], chosen: Mark | None = None) -> Section:
    """The fastest plans for a handful of budgets, with the plan that was chosen."""
    figure = tradeoff_figure((*frontier_marks(points), *([chosen] if chosen else [])))
    star = " The star is the plan that was chosen." if chosen else ""
    note = f"The fastest plan that was found for each of a handful of budgets, as predicted.{star}"
    return Section("Time against memory", f'<div class="plot half">{figure_html(figure, "frontier")}</div>', note)
