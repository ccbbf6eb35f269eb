"""The timeline as an interactive plotly figure: live bytes before and after, one above the other on one scale."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.report._palette import BUDGET, CATEGORY_COLOURS, FONT, GRID, INK, MUTED, REPLAY, REPLAY_SHADE
from lowtide.report._timeline import STACK_ORDER, Timeline, labels, thinned, timeline
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.plan import Simulation
    from lowtide.records import StepTrace

_COLUMNS = 1200
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
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


@dataclass(frozen=True)
class _Axes:
    """Both axes of both panels, with the units that suit them.

    Attributes:
        time, bytes: name of the unit, and what one is in seconds or bytes.
        end_s, top_bytes: where the axes end.
    """

    time: tuple[str, float]
    bytes: tuple[str, int]
    end_s: float
    top_bytes: float

    @classmethod
    def around(cls, lines: list[Timeline], budget_bytes: int) -> _Axes:
        end_s = max(line.end_s for line in lines)
        top = 1.06 * max(budget_bytes, *(float(line.total_bytes.max()) for line in lines))
        time = next((unit for unit in _TIME_UNITS if end_s >= 2 * unit[1]), _TIME_UNITS[-1])
        return cls(time, next(unit for unit in _UNITS if top >= unit[1]), end_s, top)

    def times(self, line: Timeline) -> Any:
        """Where each row starts, and where the last one ends."""
        return np.append(line.start_s, line.end_s) / self.time[1]

    def heights(self, count: Any) -> Any:
        """Each row's bytes; the last one twice, for a step line would otherwise stop short of the end."""
        return np.append(count, count[-1]) / self.bytes[1]


def timeline_figure(sides: dict[str, Simulation], trace: StepTrace, budget_bytes: int | None = None) -> Any:
    """Draw timelines, one above the other on one scale.

    Args:
        sides: what each is, and the step that it shows.
        trace: the step without a plan.
        budget_bytes: where a line is drawn.

    Returns:
        A ``plotly.graph_objects.Figure``. Hovering names the op that ran, its module path and its source line.
    """
    from plotly.subplots import make_subplots

    titles = [f"{name} · peak {format_bytes(side.peak_bytes)}" for name, side in sides.items()]
    spacing = {"shared_xaxes": True, "vertical_spacing": 0.12} if len(sides) > 1 else {}
    figure = make_subplots(rows=len(sides), cols=1, subplot_titles=titles, **spacing)
    figure.update_annotations(x=0, xanchor="left", font={"size": 14})
    lines = [thinned(timeline(side), _COLUMNS) for side in sides.values()]
    axes = _Axes.around(lines, budget_bytes or 0)
    for row, (line, side) in enumerate(zip(lines, sides.values(), strict=True), start=1):
        texts = _hover_texts(labels(line, side, trace))
        figure.add_traces([*_areas(line, axes), _replay_bands(line, axes), _total(line, axes, texts)], rows=row, cols=1)
        if budget_bytes is not None:
            text = f"budget {format_bytes(budget_bytes)}"
            figure.add_hline(budget_bytes / axes.bytes[1], row=row, col=1, annotation_text=text, **_BUDGET_LINE)
    _style(figure, axes)
    return figure


def _areas(line: Timeline, axes: _Axes) -> list[Any]:
    import plotly.graph_objects as go

    return [
        go.Scatter(
            x=axes.times(line),
            y=axes.heights(line.of(category)),
            name=category.value,
            stackgroup="live",
            mode="lines",
            line={"shape": "hv", "width": 0, "color": CATEGORY_COLOURS[category]},
            fillcolor=CATEGORY_COLOURS[category],
        )
        for category in STACK_ORDER
    ]


def _replay_bands(line: Timeline, axes: _Axes) -> Any:
    """One trace for all replays, so that hundreds of them cost no more than one."""
    import plotly.graph_objects as go

    x: list[float | None] = []
    y: list[float | None] = []
    top = axes.top_bytes / axes.bytes[1]
    for interval in line.replays:
        start, end = interval.start_s / axes.time[1], interval.end_s / axes.time[1]
        x += [start, start, end, end, None]
        y += [0, top, top, 0, None]
    shade = {"fill": "toself", "fillcolor": REPLAY_SHADE, "line": {"width": 0, "color": REPLAY}}
    return go.Scatter(x=x, y=y, name="replay", mode="lines", hoverinfo="skip", **shade)


def _total(line: Timeline, axes: _Axes, texts: list[str]) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        x=axes.times(line),
        y=axes.heights(line.total_bytes),
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


def _style(figure: Any, axes: _Axes) -> None:
    figure.update_layout(
        template="plotly_white",
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        showlegend=False,
        hovermode="x unified",
        hoverlabel={"bgcolor": "rgba(255,255,255,0.95)", "bordercolor": GRID, "font": {"size": 12}, "namelength": -1},
        autosize=True,
    )
    (time, second), (unit, size) = axes.time, axes.bytes
    figure.update_xaxes(range=[0, axes.end_s / second], ticksuffix=f" {time}", hoverformat=".4~g", **_TIME_AXIS)
    figure.update_yaxes(range=[0, axes.top_bytes / size], ticksuffix=f" {unit}", hoverformat=".2f", **_BYTES_AXIS)
