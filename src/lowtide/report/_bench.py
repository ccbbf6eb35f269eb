"""Policies measured side by side: rows, a terminal table, a picture and a page of time against memory."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lowtide.report._charts import tradeoff_figure
from lowtide.report._figures import Subject
from lowtide.report._marks import Mark, bench_marks
from lowtide.report._page import Section, page
from lowtide.report._palette import GRID, INK, MUTED, REPLAY
from lowtide.report._sections import code, figure_html, number, size, table
from lowtide.report._tables import plain_table
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.measure import Measurement

BENCH_FORMAT = "lowtide.bench"
BENCH_VERSION = 1
_WIDTH, _HEIGHT = 820, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 88, 120, 64, 56


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One policy.

    Attributes:
        policy: as it was asked for.
        regions: how many it replays.
        predicted_peak_bytes: by the simulation; ``None`` where it does not know what the policy keeps.
        measured: its step.
        time_ratio: its step time over that of the plain step, timed in turns.
        peak_ratio: its measured peak over that of the plain step.
    """

    policy: str
    regions: int
    predicted_peak_bytes: int | None
    measured: Measurement
    time_ratio: float
    peak_ratio: float


def bench_table(rows: tuple[BenchRow, ...], subject: Subject) -> Table:
    """The rows for a terminal."""
    shown = plain_table(f"{subject.title}: policies measured")
    shown.add_column("policy", overflow="fold", min_width=min(18, max(len(row.policy) for row in rows)))
    for heading in ("predicted", "peak", "of plain", "step time", "×", "replay"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(row.policy, *_texts(row))
    return shown


def _texts(row: BenchRow) -> list[str]:
    m = row.measured
    time = f"{format_seconds(m.step_s)} ± {m.spread_s / 2 / m.step_s:.0%}"
    predicted = "–" if row.predicted_peak_bytes is None else format_bytes(row.predicted_peak_bytes)
    sizes = [predicted, format_bytes(m.peak_bytes), f"{row.peak_ratio:.1%}"]
    return [*sizes, time, f"{row.time_ratio:.3f}", f"{m.replay_share:.1%}"]


def bench_dict(rows: tuple[BenchRow, ...], subject: Subject) -> dict[str, Any]:
    """The rows for machines."""
    return {
        "format": BENCH_FORMAT,
        "version": BENCH_VERSION,
        "target": subject.name,
        "rows": [
            {
                "policy": row.policy,
                "regions": row.regions,
                "predicted_peak_bytes": row.predicted_peak_bytes,
                "peak_bytes": row.measured.peak_bytes,
                "reserved_bytes": row.measured.reserved_bytes,
                "phase_peaks": dict(row.measured.phase_peaks),
                "peak_ratio": row.peak_ratio,
                "step_s": row.measured.step_s,
                "spread_s": row.measured.spread_s,
                "time_ratio": row.time_ratio,
                "replay_s": row.measured.replay_s,
                "tokens_per_s": row.measured.tokens_per_s,
            }
            for row in rows
        ],
    }


def bench_page(rows: tuple[BenchRow, ...], subject: Subject) -> str:
    """The rows as a page with the plot."""
    from plotly.offline import get_plotlyjs

    plot = f'<div class="plot half">{figure_html(tradeoff_figure(bench_marks(rows), joined=False), "bench")}</div>'
    headings = [
        ("policy", False),
        ("regions", True),
        ("predicted", True),
        ("peak", True),
        ("of plain", True),
        ("step time", True),
        ("×", True),
    ]
    body = [
        f"<tr>{code(r.policy)}{number(str(r.regions), r.regions)}{_predicted(r)}{size(r.measured.peak_bytes)}"
        f"{number(f'{r.peak_ratio:.1%}', r.peak_ratio)}{number(format_seconds(r.measured.step_s), r.measured.step_s)}"
        f"{number(f'{r.time_ratio:.3f}', r.time_ratio)}</tr>"
        for r in rows
    ]
    note = (
        "Measured peaks and medians of step times. Each policy was timed in turns with the plain step; the plot has its time over that of "
        "the plain step, so that it does not matter what else the machine did meanwhile."
    )
    section = Section("Time against memory", plot + table("policies", headings, body, sortable=True), note)
    lead = f"{len(rows)} ways to run one training step."
    return page(f"{subject.title}: policies measured", lead, (section,), scripts=(get_plotlyjs(),))


def _predicted(row: BenchRow) -> str:
    return '<td class="n" data-v="0">–</td>' if row.predicted_peak_bytes is None else size(row.predicted_peak_bytes)


def bench_svg(rows: tuple[BenchRow, ...], subject: Subject) -> str:
    """The plot as a picture of 820 × 480 points, both axes from zero."""
    marks = bench_marks(rows)
    most_bytes, most_s = 1.1 * max(mark.peak_bytes for mark in marks), 1.15 * max(mark.step_s for mark in marks)
    title = escape(f"{subject.title}: time of a step against its peak")
    return "\n".join(
        (
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
                f'font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13" fill="{INK}">'
            ),
            f"<title>{title}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
            f'<text x="16" y="30" font-size="16" font-weight="600">{title}</text>',
            *_grid(most_bytes, most_s),
            *(part for mark in marks for part in _point(mark, most_bytes, most_s)),
            "</svg>\n",
        )
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def _grid(most_bytes: float, most_s: float) -> list[str]:
    parts = []
    for i in range(5):
        share = i / 4
        parts.append(f'<path d="M{_x(0):.1f} {_y(share):.1f}H{_x(1):.1f}" stroke="{GRID}"/>')
        parts.append(f'<path d="M{_x(share):.1f} {_y(0):.1f}V{_y(1):.1f}" stroke="{GRID}"/>')
        seconds, count = format_seconds(share * most_s) if i else "0", format_bytes(share * most_bytes)
        parts.append(f'<text x="{_LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end" fill="{MUTED}">{seconds}</text>')
        parts.append(f'<text x="{_x(share):.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle" fill="{MUTED}">{count}</text>')
    return parts


def _point(mark: Mark, most_bytes: float, most_s: float) -> list[str]:
    x, y = _x(mark.peak_bytes / most_bytes), _y(mark.step_s / most_s)
    colour = REPLAY if mark.name.startswith("plan:") else "#4fa3a5"
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>',
        f'<text x="{x + 10:.1f}" y="{y + 4:.1f}">{escape(mark.name)}</text>',
    ]
