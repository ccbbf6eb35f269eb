"""The report as one PNG, for a README or a log, where nothing can be pointed at. Drawn by matplotlib: no browser is needed.

The charts are those of the page, but for the treemap, whose place a bar for each part of the model takes.
"""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lowtide.errors import MissingExtraError
from lowtide.plan import simulate
from lowtide.report._figures import Subject, headline
from lowtide.report._fitted import Fitted
from lowtide.report._marks import Mark, bench_marks, chosen_mark, frontier_marks
from lowtide.report._palette import INK
from lowtide.report._panels import draw_legend, draw_peak, draw_schedule, draw_timeline, draw_tradeoff

if TYPE_CHECKING:
    from lowtide.explain import Explanation
    from lowtide.records import StepTrace
    from lowtide.report._bench import BenchRow

_WIDTH, _DOTS_PER_INCH = 10.0, 120


def require_png() -> None:
    """Find out before minutes of measuring whether a PNG can be drawn.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("a PNG is drawn by matplotlib, which is not installed: pip install 'lowtide[png]'")


def fit_png(fit: Fitted, subject: Subject, found: Explanation | None = None) -> bytes:
    """The timeline without and with the plan, the schedule, and, where the step was explained, the frontier and the peak.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    sides = {"without the plan": fit.before, "with the plan": fit.after}
    figure, axes = _figure([2.6, 2.6, 1.6] + ([3.4] if found else []), f"{subject.title}: {headline(fit)}")
    span_s = max(side.step_s for side in sides.values())
    most = max(fit.budget_bytes, *(side.peak_bytes for side in sides.values()))
    for place, (name, side) in enumerate(sides.items()):
        draw_timeline(axes[place], side, name, span_s, most, fit.budget_bytes)
    draw_schedule(axes[2], fit.after, fit.trace, span_s)
    if found:
        _explained(axes[3], found, chosen_mark(fit))
    draw_legend(figure, replays=True)
    return _bytes(figure)


def trace_png(trace: StepTrace, subject: Subject, found: Explanation) -> bytes:
    """The timeline of a step, its schedule, the frontier and the peak.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    step = simulate(trace, None)
    figure, axes = _figure([2.8, 1.6, 3.4], f"{subject.title}: where the memory of one training step goes")
    draw_timeline(axes[0], step, "the step as traced", step.step_s, step.peak_bytes, None)
    draw_schedule(axes[1], step, trace, step.step_s)
    _explained(axes[2], found, None)
    draw_legend(figure, replays=False)
    return _bytes(figure)


def bench_png(rows: tuple[BenchRow, ...], subject: Subject) -> bytes:
    """Policies in a plane of peak and step time.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure, axes = _figure([4.4], f"{subject.title}: policies measured")
    draw_tradeoff(axes[0], bench_marks(rows), joined=False)
    return _bytes(figure)


def _explained(place: Any, found: Explanation, chosen: Mark | None) -> None:
    """Frontier and peak side by side in the room of one chart."""
    grid = place.get_subplotspec().subgridspec(1, 2, wspace=0.06)
    figure = place.figure
    place.remove()
    marks = (*frontier_marks(found.frontier), *([chosen] if chosen else []))
    draw_tradeoff(figure.add_subplot(grid[0]), marks, joined=True)
    draw_peak(figure.add_subplot(grid[1]), found.peak)


def _figure(heights: list[float], title: str) -> tuple[Any, list[Any]]:
    """A figure with charts of these heights, in inches, one under the other."""
    require_png()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.9), dpi=_DOTS_PER_INCH, facecolor="white")
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK, wrap=True)
    figure.set_layout_engine("constrained", w_pad=0.14, h_pad=0.08)
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    return figure, list(axes[:, 0])


def _bytes(figure: Any) -> bytes:
    file = io.BytesIO()
    # Without the version of the library, so that equal reports are equal files.
    figure.savefig(file, format="png", metadata={"Software": "lowtide"})
    return file.getvalue()
