"""All explanations of one step together: what the command and the report show."""

from __future__ import annotations

from dataclasses import dataclass

from lowtide.explain._advice import AdviceReport, advice
from lowtide.explain._frontier import FrontierPoint, frontier
from lowtide.explain._peak import Peak, peak
from lowtide.explain._regions import RegionReplay, region_replays
from lowtide.explain._saved import SavedTable, saved_table
from lowtide.records import StepTrace


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the memory of a step goes.

    Attributes:
        peak: the moment of most bytes.
        saved: what autograd saved.
        regions: what each module's replay frees, or why it frees nothing.
        frontier: the fastest plans for a handful of budgets.
        advice: what would help most.
    """

    peak: Peak
    saved: SavedTable
    regions: tuple[RegionReplay, ...]
    frontier: tuple[FrontierPoint, ...]
    advice: AdviceReport


def explain(trace: StepTrace, *, time_limit_s: float = 10.0) -> Explanation:
    """Explain a step.

    Args:
        trace: of the un-checkpointed step.
        time_limit_s: for the plans of the frontier.
    """
    points = frontier(trace, time_limit_s=time_limit_s)
    return Explanation(peak(trace), saved_table(trace), region_replays(trace), points, advice(trace, points=points))
