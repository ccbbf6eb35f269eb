"""Reports as one HTML file: of a fit, with main figures, timelines before and after and decisions; and of a trace alone."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from lowtide.explain import peak, saved_table
from lowtide.plan import simulate
from lowtide.records import Decision
from lowtide.report._figures import DOES_NOT_FIT, Figure, Subject, figures, gradient_verdict, headline
from lowtide.report._fitted import Fitted
from lowtide.report._marks import chosen_mark
from lowtide.report._page import Section, page
from lowtide.report._regions import RegionRow, decided
from lowtide.report._sections import (
    advice_section,
    breakable,
    causes_section,
    frontier_section,
    number,
    peak_section,
    saved_section,
    schedule_section,
    size,
    table,
    timeline_section,
)
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.explain import Explanation
    from lowtide.records import StepTrace


def fit_page(fit: Fitted, subject: Subject, explanation: Explanation | None = None) -> str:
    """Render the report of a fit.

    Args:
        fit: what was found.
        subject: what it was found for.
        explanation: of ``fit.trace``; without it there is no frontier, no advice, and nothing on what replays free.

    Returns:
        A complete HTML document that asks the network for nothing; plotly.js (some 4 MB) is part of it.
    """
    sides = {"Without the plan": fit.before, "With the plan": fit.after}
    sections = (
        _figures_section(fit, subject),
        timeline_section(sides, fit.trace, fit.budget_bytes),
        _regions_section(decided(fit.trace, fit.plan, fit.after)),
        *([frontier_section(explanation.frontier, chosen_mark(fit))] if explanation else []),
        schedule_section(sides, fit.trace),
        *_explaining(fit.trace, explanation),
    )
    return _document(f"{subject.title} in {format_bytes(fit.budget_bytes)}", headline(fit), sections)


def trace_page(trace: StepTrace, subject: Subject, explanation: Explanation | None = None) -> str:
    """Render the report of a step that nothing was fitted to.

    Args:
        trace: of the step.
        subject: what it is the step of.
        explanation: of it; without it there is no frontier, no advice, and nothing on what replays free.

    Returns:
        A complete HTML document, as ``fit_page``.
    """
    side = {"The step as traced": simulate(trace, None)}
    sections = (
        *([advice_section(explanation.advice), frontier_section(explanation.frontier)] if explanation else []),
        timeline_section(side, trace),
        schedule_section(side, trace),
        *_explaining(trace, explanation, advised=False),
    )
    return _document(f"Where the memory of {subject.title} goes", trace_headline(trace), sections)


def trace_headline(trace: StepTrace) -> str:
    """A trace in one sentence."""
    top = peak(trace)
    parts = ", ".join(f"{format_bytes(count)} of {category.value}" for category, count in top.categories)
    return f"A peak of {format_bytes(top.bytes)} on {trace.device} in a step of {format_seconds(top.step_s)}: {parts}."


def _document(title: str, lead: str, sections: tuple[Section, ...]) -> str:
    from plotly.offline import get_plotlyjs

    return page(title, lead, sections, scripts=(get_plotlyjs(),))


def _explaining(trace: StepTrace, explanation: Explanation | None, *, advised: bool = True) -> list[Section]:
    """What a trace says by itself, and what an explanation adds."""
    found = [peak_section(explanation.peak if explanation else peak(trace))]
    found.append(saved_section(explanation.saved if explanation else saved_table(trace)))
    if explanation:
        found.append(causes_section(explanation.regions))
        found += [advice_section(explanation.advice)] if advised else []
    return found


def _figures_section(fit: Fitted, subject: Subject) -> Section:
    rows = [_figure_row(row) for row in figures(fit, subject)]
    headings = [("", False), ("without the plan", True), ("with the plan", True), ("", True)]
    note = (
        f"Bytes on {fit.trace.device}; times are medians of {fit.planned.steps} measured steps; "
        "the peaks traced and predicted come from the trace alone."
    )
    return Section("Figures", _cards(fit) + table("figures", headings, rows), note)


def _cards(fit: Fitted) -> str:
    saved = 1 - fit.planned.peak_bytes / fit.plain.peak_bytes
    over = fit.planned.peak_bytes > fit.budget_bytes
    cards = (
        _card(format_bytes(fit.planned.peak_bytes), "measured peak with the plan", bad=over),
        _card(format_bytes(fit.plain.peak_bytes), f"{'measured' if fit.plain_fits else 'traced'} peak without"),
        _card(f"{saved:.0%}", "less memory"),
        _card(f"{fit.step_ratio - 1:+.1%}" if fit.plain_fits else DOES_NOT_FIT, "step time" if fit.plain_fits else "without the plan"),
        _card(gradient_verdict(fit), "gradients", bad=not fit.verification.equal),
    )
    return f'<div class="cards">{"".join(cards)}</div>'


def _card(value: str, caption: str, *, bad: bool = False) -> str:
    # A number and its unit stay on one line.
    value = value.replace(" ", "\N{NO-BREAK SPACE}") if value[0].isdigit() else value
    return f'<div class="card{" bad" if bad else ""}"><b>{escape(value)}</b><span>{escape(caption)}</span></div>'


def _figure_row(row: Figure) -> str:
    numbers = "".join(f'<td class="n">{escape(value)}</td>' for value in (row.plain, row.planned, row.change))
    start = '<tr class="bad">' if row.alarming else "<tr>"
    return f"{start}<td>{escape(row.name)}</td>{numbers}</tr>"


def _regions_section(rows: tuple[RegionRow, ...]) -> Section:
    words, numbers = ("region", "module", "decision"), ("saved by autograd", "freed by its replay", "replay")
    headings = [*((word, False) for word in words), *((word, True) for word in numbers)]
    most = max((row.saved_bytes for row in rows), default=0)
    body = [_region_row(row, most) for row in rows]
    replayed = [row for row in rows if row.decision is not Decision.KEEP]
    freed, replay_s = format_bytes(sum(row.freed_bytes for row in replayed)), format_seconds(sum(row.replay_s for row in replayed))
    note = f"{len(replayed)} of {len(rows)} rows are replayed: {freed} freed after forward, for {replay_s} of replay in backward."
    return Section("Decisions", table("regions", headings, body, sortable=True), note)


def _region_row(row: RegionRow, most_bytes: int) -> str:
    width = 100 * row.saved_bytes / most_bytes if most_bytes else 0
    kept = row.decision is Decision.KEEP
    replayed = '<td class="n" data-v="0"></td>' * 2 if kept else size(row.freed_bytes) + number(format_seconds(row.replay_s), row.replay_s)
    return (
        f'<tr><td title="{escape(", ".join(row.paths))}"><code>{breakable(row.name)}</code></td><td>{escape(row.type)}</td>'
        f'<td><span class="tag {row.decision.value}">{row.decision.value}</span></td>'
        f'<td class="n" data-v="{row.saved_bytes}">{format_bytes(row.saved_bytes)}<span class="bar" style="width:{width:.0f}%"></span></td>'
        f"{replayed}</tr>"
    )
