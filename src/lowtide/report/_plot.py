"""The timeline as an interactive plotly figure: live bytes before and after, one above the other on one scale."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np

from lowtide.report._fitted import Fitted
from lowtide.report._palette import BUDGET, CATEGORY_COLOURS, FONT, GRID, INK, MUTED, REPLAY, REPLAY_SHADE
from lowtide.report._timeline import STACK_ORDER, Timeline, labels, thinned, timeline
from lowtide.units import format_bytes

_COLUMNS = 1200
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_BUDGET_LINE = {
    "line": {"color": BUDGET, "width": 1.5, "dash": "dash"},
    "annotation_position": "top right",
    "annotation_font": {"color": BUDGET, "size": 12},
}
_BYTES_AXIS = {
    "gridcolor": GRID,
    "zeroline": False,
    "automargin": True,
    "fixedrange": True,
    "ticks": "outside",
    "ticklen": 6,
    "tickcolor": "white",
}
_TIME_AXIS = {"showgrid": False, "ticks": "outside", "ticklen": 5, "tickcolor": MUTED, "showticklabels": True}


def timeline_figure(fit: Fitted) -> Any:
    """Draw the timelines.

    Returns:
        A ``plotly.graph_objects.Figure``. Hovering names the op that ran, its module path and its source line.
    """
    from plotly.subplots import make_subplots

    sides = (fit.before, fit.after)
    titles = [
        f"{name} · peak {format_bytes(side.peak_bytes)}" for name, side in zip(("Without the plan", "With the plan"), sides, strict=True)
    ]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=titles)
    figure.update_annotations(x=0, xanchor="left", font={"size": 14})
    lines = [thinned(timeline(simulation), _COLUMNS) for simulation in sides]
    highest = 1.06 * max(fit.budget_bytes, *(float(line.total_bytes.max()) for line in lines))
    unit, scale = next((name, size) for name, size in _UNITS if highest >= size)
    budget = f"budget {format_bytes(fit.budget_bytes)}"
    for row, (line, simulation) in enumerate(zip(lines, sides, strict=True), start=1):
        texts = _hover_texts(labels(line, simulation, fit.trace))
        figure.add_traces([*_areas(line, scale), _replay_bands(line, highest / scale), _total(line, scale, texts)], rows=row, cols=1)
        figure.add_hline(fit.budget_bytes / scale, row=row, col=1, annotation_text=budget, **_BUDGET_LINE)
    _style(figure, unit, highest / scale, max(line.end_s for line in lines))
    return figure


def _steps(line: Timeline, values: Any) -> Any:
    """The last value is repeated at the end of the step, where a step line would otherwise stop short."""
    return np.append(values, values[-1])


def _milliseconds(line: Timeline) -> Any:
    return np.append(line.start_s, line.end_s) * 1e3


def _areas(line: Timeline, scale: int) -> list[Any]:
    import plotly.graph_objects as go

    return [
        go.Scatter(
            x=_milliseconds(line),
            y=_steps(line, line.of(category) / scale),
            name=category.value,
            stackgroup="live",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": CATEGORY_COLOURS[category]},
            fillcolor=CATEGORY_COLOURS[category],
        )
        for category in STACK_ORDER
    ]


def _replay_bands(line: Timeline, top: float) -> Any:
    """One trace for all replays, so that hundreds of them cost no more than one."""
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[float | None] = []
    for interval in line.replays:
        start, end = interval.start_s * 1e3, interval.end_s * 1e3
        x += [start, start, end, end, None]
        y += [0, top, top, 0, None]
    return go.Scatter(
        x=x, y=y, name="replay", mode="lines", fill="toself", line={"width": 0, "color": REPLAY}, fillcolor=REPLAY_SHADE, hoverinfo="skip"
    )


def _total(line: Timeline, scale: int, texts: list[str]) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=_milliseconds(line),
        y=_steps(line, line.total_bytes / scale),
        customdata=[*texts, texts[-1]],
        name="total",
        mode="lines",
        line={"shape": "hv", "width": 1, "color": INK},
        hovertemplate="<b>%{y}</b> alive<br>%{customdata}<extra></extra>",
    )


def _hover_texts(lines: list[str]) -> list[str]:
    """Op in bold, then module path, source line and phase; what came from user code is escaped."""
    texts = []
    for line in lines:
        op, *rest = escape(line).split("\n")
        texts.append("<br>".join((f"<b>{op}</b>", *rest)))
    return texts


def _style(figure: Any, unit: str, top: float, end_s: float) -> None:
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        showlegend=False,
        hovermode="x unified",
        hoverlabel={"bgcolor": "rgba(255,255,255,0.95)", "bordercolor": GRID, "font": {"size": 12}},
        autosize=True,
    )
    figure.update_yaxes(range=[0, top], ticksuffix=f" {unit}", hoverformat=".2f", **_BYTES_AXIS)
    figure.update_xaxes(range=[0, end_s * 1e3], ticksuffix=" ms", hoverformat=".3f", **_TIME_AXIS)
