"""The charts of a report drawn on matplotlib's axes, one function a chart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.report._charts import LANE_COLOURS, byte_unit, time_unit
from lowtide.report._marks import Mark
from lowtide.report._palette import BUDGET, CATEGORY_COLOURS, GRID, INK, MUTED, REPLAY
from lowtide.report._schedule import LANES, schedule, unit_of
from lowtide.report._timeline import STACK_ORDER, thinned, timeline
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.explain import Peak
    from lowtide.plan import Simulation
    from lowtide.records import StepTrace

_COLUMNS = 1200
_MOST_MODULES = 12


def draw_timeline(axes: Any, simulation: Simulation, title: str, span_s: float, most_bytes: float, budget_bytes: int | None) -> None:
    """Live bytes over time, stacked by category, with replays shaded and the budget as a line."""
    line = thinned(timeline(simulation), _COLUMNS)
    size, unit = byte_unit(most_bytes)
    second, time = time_unit(span_s)
    edges = np.append(line.start_s, line.end_s) / second
    floor = np.zeros(len(line.start_s))
    for category in STACK_ORDER:
        ceiling = floor + line.of(category) / size
        axes.fill_between(edges, _closed(floor), _closed(ceiling), step="post", color=CATEGORY_COLOURS[category], linewidth=0)
        floor = ceiling
    for replay in line.replays:
        axes.axvspan(replay.start_s / second, replay.end_s / second, color=REPLAY, alpha=0.18, linewidth=0)
    if budget_bytes is not None:
        axes.axhline(budget_bytes / size, color=BUDGET, linewidth=1.2, linestyle=(0, (5, 3)))
        at = {"xy": (1, budget_bytes / size), "xycoords": ("axes fraction", "data"), "xytext": (-4, 4), "textcoords": "offset points"}
        axes.annotate(f"budget {format_bytes(budget_bytes)}", ha="right", color=BUDGET, fontsize=9, **at)
    _framed(axes, f"{title} · peak {format_bytes(simulation.peak_bytes)}")
    axes.set(xlim=(0, span_s / second), ylim=(0, 1.08 * most_bytes / size), ylabel=unit, xlabel=time)


def _closed(values: Any) -> Any:
    """A step function's last value holds to its end."""
    return np.append(values, values[-1])


def draw_schedule(axes: Any, simulation: Simulation, trace: StepTrace, span_s: float) -> None:
    """Forward, replays, backward and the optimizer as bars, a lane each."""
    second, unit = time_unit(span_s)
    stretches = schedule(simulation, trace)
    for place, lane in enumerate(reversed(LANES)):
        bars = [(s.start_s / second, (s.end_s - s.start_s) / second) for s in stretches if s.lane == lane]
        axes.broken_barh(bars, (place - 0.36, 0.72), facecolor=LANE_COLOURS[lane], edgecolor="white", linewidth=0.4)
    _framed(axes, "what runs when")
    axes.set(xlim=(0, span_s / second), ylim=(-0.6, len(LANES) - 0.4), xlabel=unit, yticks=range(len(LANES)))
    axes.set_yticklabels(list(reversed(LANES)))
    axes.grid(visible=False)


def draw_peak(axes: Any, peak: Peak) -> None:
    """What was alive at the peak: a bar for each part of the model, in the colours of the categories."""
    rows: dict[str, dict[Any, int]] = {}
    for owner in peak.owners:
        by_category = rows.setdefault(owner.path if " " in owner.path else unit_of(owner.path), {})
        by_category[owner.category] = by_category.get(owner.category, 0) + owner.bytes
    largest = sorted(rows, key=lambda name: -sum(rows[name].values()))[:_MOST_MODULES]
    size, unit = byte_unit(max(sum(rows[name].values()) for name in largest))
    for place, name in enumerate(reversed(largest)):
        left = 0.0
        for category in STACK_ORDER:
            width = rows[name].get(category, 0) / size
            axes.barh(place, width, left=left, height=0.72, color=CATEGORY_COLOURS[category])
            left += width
    hidden = len(rows) - len(largest)
    _framed(axes, "peak by module" + (f", the largest {len(largest)} of {len(rows)}" if hidden else ""))
    axes.set(yticks=range(len(largest)), xlabel=unit)
    axes.set_yticklabels(list(reversed(largest)))
    axes.grid(visible=False, axis="y")


def draw_tradeoff(axes: Any, marks: Iterable[Mark], *, joined: bool) -> None:
    """Time of a step against its peak."""
    marks = sorted(marks, key=lambda mark: mark.peak_bytes)
    size, unit = byte_unit(max(mark.peak_bytes for mark in marks))
    second, time = time_unit(max(mark.step_s for mark in marks))
    if joined:
        others = [mark for mark in marks if not mark.chosen]
        axes.plot([m.peak_bytes / size for m in others], [m.step_s / second for m in others], color=MUTED, linewidth=0.8, linestyle=":")
    for mark in marks:
        look = {"marker": "*", "s": 190, "color": REPLAY} if mark.chosen else {"marker": "o", "s": 48, "color": LANE_COLOURS["forward"]}
        axes.scatter([mark.peak_bytes / size], [mark.step_s / second], zorder=3, edgecolors="white", linewidths=0.8, **look)
        if mark.named:
            offset = {"xytext": (0, -14), "textcoords": "offset points"}
            axes.annotate(mark.name, (mark.peak_bytes / size, mark.step_s / second), ha="center", fontsize=9, **offset)
    _framed(axes, "time against memory")
    axes.set(xlabel=f"peak, {unit}", ylabel=f"step time, {time}")
    axes.set_xlim(left=0, right=1.1 * max(m.peak_bytes for m in marks) / size)
    axes.set_ylim(bottom=0, top=1.15 * max(m.step_s for m in marks) / second)


def draw_legend(figure: Any, *, replays: bool) -> None:
    """What the colours stand for, in a row at the foot."""
    from matplotlib.patches import Patch

    patches = [Patch(color=CATEGORY_COLOURS[category], label=category.value) for category in STACK_ORDER]
    patches += [Patch(color=REPLAY, alpha=0.3, label="replay")] if replays else []
    look = {"frameon": False, "fontsize": 9, "handlelength": 1, "columnspacing": 1.4}
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), **look)


def _framed(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, labelsize=9, length=0)
    axes.spines[:].set_visible(False)
