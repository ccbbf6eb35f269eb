"""The timeline as one standalone SVG, for a README or a log: stacked areas drawn by hand, no browser needed."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from lowtide.report._figures import Subject
from lowtide.report._fitted import Fitted
from lowtide.report._palette import BUDGET, CATEGORY_COLOURS, GRID, INK, MUTED, REPLAY
from lowtide.report._timeline import STACK_ORDER, Timeline, thinned, timeline
from lowtide.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 960, 640
_LEFT, _RIGHT, _TOP, _GAP, _BOTTOM = 84, 24, 104, 52, 34
_TEXT = f'role="img" font-family="system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif" font-size="13" fill="{INK}"'
_COLUMNS = 480
_PANEL_HEIGHT = (_HEIGHT - _TOP - _GAP - _BOTTOM) / 2


@dataclass(frozen=True)
class _Scale:
    """From seconds and bytes to points of the picture; ``top`` is where the panel begins."""

    span_s: float
    ceiling_bytes: float
    top: float

    def x(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        return _LEFT + seconds / self.span_s * (_WIDTH - _LEFT - _RIGHT)

    def y(self, count: NDArray[np.float64] | float) -> NDArray[np.float64]:
        return np.asarray(self.top + _PANEL_HEIGHT * (1 - np.asarray(count) / self.ceiling_bytes))


def timeline_svg(fit: Fitted, subject: Subject) -> str:
    """Draw live bytes before and after, on one scale, with budget line and replays.

    Returns:
        An SVG document of 960 × 640 points.
    """
    lines = [thinned(timeline(simulation), _COLUMNS) for simulation in (fit.before, fit.after)]
    span_s = max(line.end_s for line in lines)
    ceiling = 1.08 * max(fit.budget_bytes, *(float(line.total_bytes.max()) for line in lines))
    scales = [_Scale(span_s, ceiling, _TOP + number * (_PANEL_HEIGHT + _GAP)) for number in range(2)]
    titles = (f"without the plan: {format_bytes(fit.before.peak_bytes)}", f"with the plan: {format_bytes(fit.after.peak_bytes)}")
    parts = [
        part for line, scale, title in zip(lines, scales, titles, strict=True) for part in _panel(line, scale, title, fit.budget_bytes)
    ]
    return "\n".join((*_opening(subject.title), *parts, *_time_axis(scales[-1]), "</svg>\n"))


def _opening(name: str) -> list[str]:
    title = escape(f"{name}: bytes alive during one training step")
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" {_TEXT}>',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="16" font-weight="600">{title}</text>',
        *_legend(),
    ]


def _legend() -> list[str]:
    parts, x = [], 16.0
    for text, colour, opacity in (*((c.value, CATEGORY_COLOURS[c], 1.0) for c in STACK_ORDER), ("replay", REPLAY, 0.25)):
        parts.append(f'<rect x="{x:.0f}" y="42" width="12" height="12" rx="2" fill="{colour}" fill-opacity="{opacity}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="53">{text}</text>')
        x += 40 + 7.2 * len(text)
    return parts


def _panel(line: Timeline, scale: _Scale, title: str, budget_bytes: int) -> list[str]:
    budget_y = float(scale.y(budget_bytes))
    right = _WIDTH - _RIGHT
    return [
        f'<text x="{_LEFT}" y="{scale.top - 8:.1f}" font-weight="600">{escape(title)}</text>',
        *_byte_axis(scale),
        *_areas(line, scale),
        *_replays(line, scale),
        f'<path d="M{_LEFT} {budget_y:.1f}H{right}" stroke="{BUDGET}" stroke-width="1.5" stroke-dasharray="6 4"/>',
        f'<text x="{right - 4}" y="{budget_y - 5:.1f}" text-anchor="end" fill="{BUDGET}">budget {format_bytes(budget_bytes)}</text>',
    ]


def _areas(line: Timeline, scale: _Scale) -> list[str]:
    edges = scale.x(np.append(line.start_s, line.end_s))
    floor = np.zeros(len(line.start_s))
    parts = []
    for category in STACK_ORDER:
        ceiling = floor + line.of(category)
        path = _steps(edges, scale.y(ceiling), scale.y(floor))
        parts.append(f'<path d="{path}" fill="{CATEGORY_COLOURS[category]}"/>')
        floor = ceiling
    return parts


def _steps(edges: NDArray[np.float64], upper: NDArray[np.float64], lower: NDArray[np.float64]) -> str:
    """Outline of an area whose upper and lower edge are step functions: out along the one, back along the other."""
    there = " ".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(edges[1:], upper, strict=True))
    back = " ".join(f"V{y:.1f}H{x:.1f}" for x, y in zip(edges[-2::-1], lower[::-1], strict=True))
    return f"M{edges[0]:.1f} {lower[0]:.1f}{there}{back}Z"


def _replays(line: Timeline, scale: _Scale) -> list[str]:
    if not line.replays:
        return []
    starts = scale.x(np.array([interval.start_s for interval in line.replays]))
    ends = scale.x(np.array([interval.end_s for interval in line.replays]))
    boxes = "".join(f"M{a:.1f} {scale.top:.1f}H{b:.1f}V{scale.top + _PANEL_HEIGHT:.1f}H{a:.1f}Z" for a, b in zip(starts, ends, strict=True))
    return [f'<path d="{boxes}" fill="{REPLAY}" fill-opacity="0.18"/>']


def _byte_axis(scale: _Scale) -> list[str]:
    parts = []
    for count in _round_steps(scale.ceiling_bytes):
        y, text = float(scale.y(count)), format_bytes(count).replace(".00", "")
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="{GRID}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{text}</text>')
    return parts


def _round_steps(ceiling: float) -> list[float]:
    """Three to six round numbers of bytes from zero up: powers of two times 1024^n."""
    step = 2.0 ** np.floor(np.log2(ceiling / 3))
    return [step * count for count in range(int(ceiling // step) + 1)]


def _time_axis(scale: _Scale) -> list[str]:
    y = scale.top + _PANEL_HEIGHT + 20
    step_s = _decimal_step(scale.span_s / 5)
    marks = step_s * np.arange(int(scale.span_s / step_s) + 1, dtype=np.float64)
    return [
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{MUTED}">{format_seconds(float(mark)) if mark else "0"}</text>'
        for x, mark in zip(scale.x(marks), marks, strict=True)
    ]


def _decimal_step(about: float) -> float:
    """The largest of 1, 2, 5 times a power of ten that is no larger.

    >>> _decimal_step(0.0235), _decimal_step(7)
    (0.02, 5.0)
    """
    power = float(10.0 ** np.floor(np.log10(about)))
    return max(digit * power for digit in (1, 2, 5) if digit * power <= about)
