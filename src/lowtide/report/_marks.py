"""The points of a chart of time against memory, whoever draws it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from lowtide.report._fitted import Fitted
from lowtide.report._timeline import region_name
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.explain import FrontierPoint
    from lowtide.report._bench import BenchRow


@dataclass(frozen=True, slots=True)
class Mark:
    """One way to run a step, in a chart of time against memory.

    Attributes:
        name: what it is.
        peak_bytes, step_s: where it lies.
        text: shown when pointed at, beside both.
        chosen: it is what was decided.
        named: its name is written beside it.
    """

    name: str
    peak_bytes: int
    step_s: float
    text: str = ""
    chosen: bool = False
    named: bool = True


def frontier_marks(points: tuple[FrontierPoint, ...]) -> tuple[Mark, ...]:
    """The fastest plans for a handful of budgets."""
    return tuple(Mark(_point_name(p), p.peak_bytes, p.step_s, _point_text(p), named=not p.regions) for p in points)


def chosen_mark(fit: Fitted) -> Mark:
    """The plan of a fit, as predicted."""
    text = f"budget {format_bytes(fit.budget_bytes)}, {len(fit.plan.regions)} regions replayed"
    return Mark("this plan", fit.after.peak_bytes, fit.after.planned_s, text, chosen=True)


def bench_marks(rows: tuple[BenchRow, ...]) -> tuple[Mark, ...]:
    """Policies, as measured.

    Each was timed in turns with the plain step, and some time after the one before it: the machine may have been faster or slower by then.
    So what is drawn is the time over that of the plain step, in the plain step's time of all along.
    """
    plain_s = median(row.measured.step_s / row.time_ratio for row in rows)
    return tuple(Mark(r.policy, r.measured.peak_bytes, r.time_ratio * plain_s, f"{r.time_ratio:.3f} × the plain step") for r in rows)


def _point_name(point: FrontierPoint) -> str:
    return "nothing replayed" if not point.regions else f"{len(point.regions)} region{'s' if len(point.regions) > 1 else ''} replayed"


def _point_text(point: FrontierPoint) -> str:
    names = ", ".join(region_name(region.paths) for region in point.regions[:4])
    return names + (", …" if len(point.regions) > 4 else "")
