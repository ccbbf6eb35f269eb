"""The report of a fit as one HTML file: main figures, timeline before and after, decisions."""

from __future__ import annotations

from html import escape

from lowtide.records import Decision
from lowtide.report._figures import Figure, Subject, figures, gradient_verdict, headline
from lowtide.report._fitted import Fitted
from lowtide.report._page import Section, page
from lowtide.report._palette import CATEGORY_COLOURS, REPLAY_SHADE
from lowtide.report._regions import RegionRow, decided
from lowtide.report._timeline import STACK_ORDER
from lowtide.units import format_bytes, format_seconds

_PLOT_OPTIONS = {"responsive": True, "displayModeBar": False}


def fit_page(fit: Fitted, subject: Subject) -> str:
    """Render the report.

    Returns:
        A complete HTML document that asks the network for nothing; plotly.js (some 4 MB) is part of it.
    """
    from plotly.offline import get_plotlyjs

    sections = (_figures_section(fit, subject), _timeline_section(fit), _regions_section(decided(fit.trace, fit.plan, fit.after)))
    return page(f"{subject.title} in {format_bytes(fit.budget_bytes)}", headline(fit), sections, scripts=(get_plotlyjs(),))


def _figures_section(fit: Fitted, subject: Subject) -> Section:
    rows = "".join(_figure_row(row) for row in figures(fit, subject))
    head = "<tr><th></th><th class=n>without the plan</th><th class=n>with the plan</th><th class=n></th></tr>"
    note = (
        f"Bytes on {fit.trace.device}; times are medians of {fit.planned.steps} measured steps; "
        "the peaks traced and predicted come from the trace alone."
    )
    return Section("Figures", _cards(fit) + _table("figures", head, rows), note)


def _table(name: str, head: str, rows: str) -> str:
    return f'<div class="scroll"><table id="{name}"><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _cards(fit: Fitted) -> str:
    saved = 1 - fit.planned.peak_bytes / fit.plain.peak_bytes
    over = fit.planned.peak_bytes > fit.budget_bytes
    cards = (
        _card(format_bytes(fit.planned.peak_bytes), "measured peak with the plan", bad=over),
        _card(format_bytes(fit.plain.peak_bytes), "measured peak without"),
        _card(f"{saved:.0%}", "less memory"),
        _card(f"{fit.step_ratio - 1:+.1%}", "step time"),
        _card(gradient_verdict(fit), "gradients", bad=not fit.verification.equal),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, caption: str, *, bad: bool = False) -> str:
    return f'<div class="card{" bad" if bad else ""}"><b>{escape(value)}</b><span>{escape(caption)}</span></div>'


def _figure_row(row: Figure) -> str:
    numbers = "".join(f'<td class="n">{escape(value)}</td>' for value in (row.plain, row.planned, row.change))
    start = '<tr class="bad">' if row.alarming else "<tr>"
    return f"{start}<td>{escape(row.name)}</td>{numbers}</tr>"


def _timeline_section(fit: Fitted) -> Section:
    from plotly.io import to_html

    from lowtide.report._plot import timeline_figure

    plot = to_html(timeline_figure(fit), full_html=False, include_plotlyjs=False, config=_PLOT_OPTIONS, div_id="timeline")
    note = (
        "Bytes alive at each moment of one step, stacked by what they are for; the line is their sum. "
        "Point at a moment to see the op that ran then and where it was called; drag to zoom, double-click to go back."
    )
    return Section("Timeline", f'{_legend()}<div class="plot">{plot}</div>', note)


def _legend() -> str:
    """In HTML rather than in the plot, so that it wraps on a narrow screen."""
    swatches = (*((CATEGORY_COLOURS[category], category.value) for category in STACK_ORDER), (REPLAY_SHADE, "replay"))
    items = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for colour, name in swatches)
    return f'<ul class="legend">{items}</ul>'


def _regions_section(rows: tuple[RegionRow, ...]) -> Section:
    words, numbers = ("region", "module", "decision"), ("saved by autograd", "freed by its replay", "replay")
    head = "<tr>" + "".join(f"<th>{name}</th>" for name in words) + "".join(f"<th class=n>{name}</th>" for name in numbers) + "</tr>"
    most = max((row.saved_bytes for row in rows), default=0)
    body = "".join(_region_row(row, most) for row in rows)
    replayed = [row for row in rows if row.decision is not Decision.KEEP]
    freed, replay_s = format_bytes(sum(row.freed_bytes for row in replayed)), format_seconds(sum(row.replay_s for row in replayed))
    note = f"{len(replayed)} of {len(rows)} rows are replayed: {freed} freed after forward, for {replay_s} of replay in backward."
    return Section("Decisions", _table("regions", head, body), note)


def _breakable(path: str) -> str:
    """A module path that a browser breaks after its dots, where a line gets too long."""
    return escape(path).replace(".", ".<wbr>")


def _region_row(row: RegionRow, most_bytes: int) -> str:
    width = 100 * row.saved_bytes / most_bytes if most_bytes else 0
    freed, replay = (format_bytes(row.freed_bytes), format_seconds(row.replay_s)) if row.decision is not Decision.KEEP else ("", "")
    return (
        f'<tr><td title="{escape(", ".join(row.paths))}"><code>{_breakable(row.name)}</code></td><td>{escape(row.type)}</td>'
        f'<td><span class="tag {row.decision.value}">{row.decision.value}</span></td>'
        f'<td class="n">{format_bytes(row.saved_bytes)}<span class="bar" style="width:{width:.0f}%"></span></td>'
        f'<td class="n">{freed}</td><td class="n">{replay}</td></tr>'
    )
