"""The charts beside the timeline: a treemap of the peak, time against memory, and the schedule of a step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from lowtide.records import StepTrace
from lowtide.report._marks import Mark
from lowtide.report._palette import CATEGORY_COLOURS, FONT, GRID, INK, MUTED, REPLAY
from lowtide.report._schedule import LANES, schedule
from lowtide.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.explain import Peak
    from lowtide.plan import Simulation

_MOST_OWNERS = 600
_ALL = "peak"
_OTHERS = "(smaller ones)"
LANE_COLOURS = {"forward": "#4fa3a5", "replay": REPLAY, "backward": "#3d4f6b", "optimizer": "#e8b04b"}
_LAYOUT = {
    "template": "plotly_white",
    "font": {"family": FONT, "size": 13, "color": INK},
    "margin": {"l": 8, "r": 8, "t": 36, "b": 8},
    "showlegend": False,
    "hoverlabel": {"bgcolor": "rgba(255,255,255,0.95)", "bordercolor": GRID, "font": {"size": 12, "color": INK}, "namelength": -1},
    "autosize": True,
}


def treemap_figure(peak: Peak) -> Any:
    """What was alive at the peak, module inside module; the innermost boxes are categories, in their colours."""
    import plotly.graph_objects as go

    boxes = _boxes(peak)
    return go.Figure(
        go.Treemap(
            ids=[box.id for box in boxes],
            labels=[escape(box.label) for box in boxes],
            parents=[box.parent for box in boxes],
            values=[box.bytes for box in boxes],
            text=[format_bytes(box.bytes) for box in boxes],
            customdata=[escape(box.where) for box in boxes],
            marker={
                "colors": [box.colour for box in boxes],
                "line": {"color": "white", "width": 1},
                "pad": {"t": 20, "l": 2, "r": 2, "b": 2},
            },
            branchvalues="total",
            texttemplate="%{label} %{text}",
            hovertemplate="<b>%{customdata}</b><br>%{text}, %{percentRoot:.1%} of the peak<extra></extra>",
            tiling={"pad": 1},
        ),
        # A name that is too small to be read is left to the hover.
        layout={**_LAYOUT, "margin": {"l": 0, "r": 0, "t": 24, "b": 0}, "uniformtext": {"minsize": 9, "mode": "hide"}},
    )


@dataclass
class _Box:
    id: str
    label: str
    parent: str
    where: str
    colour: str
    bytes: int = 0


def _boxes(peak: Peak) -> list[_Box]:
    """The root, a box for each module on the way, and one for each category of each owner."""
    found = {_ALL: _Box(_ALL, "all that is alive at the peak", "", "all that is alive at the peak", "#f3f4f6")}
    for place, owner in enumerate(peak.owners):
        path = owner.path if place < _MOST_OWNERS else _OTHERS
        above = _ALL
        found[_ALL].bytes += owner.bytes
        for name in _steps(path):
            box = found.setdefault(f"{_ALL}/{name}", _Box(f"{_ALL}/{name}", name.rpartition(".")[2], above, name, "#e5e8ee"))
            box.bytes += owner.bytes
            above = box.id
        kind = owner.category.value
        leaf = found.setdefault(
            f"{above}:{kind}", _Box(f"{above}:{kind}", kind, above, f"{path}: {kind}", CATEGORY_COLOURS[owner.category])
        )
        leaf.bytes += owner.bytes
    return list(found.values())


def _steps(path: str) -> Iterable[str]:
    """A path and those around it, outermost first; what is no path stands for itself.

    >>> list(_steps("blocks.0.mlp")), list(_steps("outside any module"))
    (['blocks', 'blocks.0', 'blocks.0.mlp'], ['outside any module'])
    """
    parts = [path] if " " in path or "/" in path else path.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def tradeoff_figure(marks: tuple[Mark, ...], *, joined: bool = True) -> Any:
    """Time of a step against its peak; the chosen way is marked."""
    import plotly.graph_objects as go

    size, unit = byte_unit(max(mark.peak_bytes for mark in marks))
    second, time = time_unit(max(mark.step_s for mark in marks))
    figure = go.Figure(layout=_LAYOUT)
    most = max(mark.peak_bytes for mark in marks)
    for chosen in (False, True):
        of_kind = sorted((m for m in marks if m.chosen == chosen), key=lambda m: m.peak_bytes)
        figure.add_trace(_marks(of_kind, size, second, chosen=chosen, joined=joined))
        # A name at the right edge would be cut off there.
        figure.data[-1].textposition = ["bottom left" if mark.peak_bytes > 0.8 * most else "bottom center" for mark in of_kind]
    # Where the axes meet each has a label: unseen ticks keep them apart.
    figure.update_xaxes(ticks="outside", ticklen=8, tickcolor="rgba(0, 0, 0, 0)")
    figure.update_xaxes(title="peak", ticksuffix=f" {unit}", gridcolor=GRID, rangemode="tozero", zeroline=False, automargin=True)
    figure.update_yaxes(title="step time", ticksuffix=f" {time}", gridcolor=GRID, rangemode="tozero", zeroline=False, automargin=True)
    return figure


def _marks(marks: list[Mark], size: int, second: float, *, chosen: bool, joined: bool) -> Any:
    import plotly.graph_objects as go

    look = {"symbol": "star", "size": 18, "color": REPLAY} if chosen else {"size": 11, "color": LANE_COLOURS["forward"]}
    texts = [f"<b>{escape(m.name)}</b><br>{format_bytes(m.peak_bytes)}, {format_seconds(m.step_s)}<br>{escape(m.text)}" for m in marks]
    return go.Scatter(
        x=[m.peak_bytes / size for m in marks],
        y=[m.step_s / second for m in marks],
        text=[escape(m.name) if m.named else "" for m in marks],
        customdata=texts,
        mode="markers+text" if chosen or not joined else "lines+markers+text",
        line={"color": MUTED, "width": 1, "dash": "dot"},
        marker={**look, "line": {"color": "white", "width": 1}},
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
    )


def schedule_figure(sides: dict[str, Simulation], trace: StepTrace) -> Any:
    """Forward, replays, backward and the optimizer as bars over time, one panel a side."""
    from plotly.subplots import make_subplots

    second, unit = time_unit(max(side.step_s for side in sides.values()))
    spacing = {"shared_xaxes": True, "vertical_spacing": 0.16} if len(sides) > 1 else {}
    titles = [f"{name} · {format_seconds(side.step_s)}" for name, side in sides.items()]
    figure = make_subplots(rows=len(sides), cols=1, subplot_titles=titles, **spacing)
    figure.update_annotations(x=0, xanchor="left", font={"size": 14})
    for row, side in enumerate(sides.values(), start=1):
        figure.add_traces([_lane(side, trace, lane, second) for lane in LANES], rows=row, cols=1)
    figure.update_layout(**_LAYOUT, barmode="overlay", bargap=0.25)
    end = max(side.step_s for side in sides.values()) / second
    figure.update_xaxes(ticksuffix=f" {unit}", range=[0, end], showgrid=False, showticklabels=True)
    figure.update_yaxes(categoryorder="array", categoryarray=list(reversed(LANES)), fixedrange=True, automargin=True, ticksuffix=" ")
    return figure


def _lane(side: Simulation, trace: StepTrace, lane: str, second: float) -> Any:
    import plotly.graph_objects as go

    stretches = [s for s in schedule(side, trace) if s.lane == lane]
    return go.Bar(
        base=[s.start_s / second for s in stretches],
        x=[(s.end_s - s.start_s) / second for s in stretches],
        y=[lane] * len(stretches),
        customdata=[f"<b>{escape(s.name)}</b><br>{lane}, {format_seconds(s.end_s - s.start_s)}" for s in stretches],
        orientation="h",
        name=lane,
        marker={"color": LANE_COLOURS[lane], "line": {"color": "white", "width": 0.5 if len(stretches) < 300 else 0}},
        hovertemplate="%{customdata}<extra></extra>",
    )


def byte_unit(most: float) -> tuple[int, str]:
    """The unit in which a chart counts bytes."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next((unit for unit in units if most >= unit[0]), (1, "B"))


def time_unit(most_s: float) -> tuple[float, str]:
    """The unit in which a chart counts time."""
    units = ((1.0, "s"), (1e-3, "ms"))
    return next((unit for unit in units if most_s >= 2 * unit[0]), (1e-6, "µs"))
