"""Where the memory of a step goes, why, and what would help. From a trace alone, without torch."""

from __future__ import annotations

from lowtide.explain._advice import Advice, AdviceReport, Remedy, advice
from lowtide.explain._alive import Alive, Holder, why_alive
from lowtide.explain._explanation import Explanation, explain
from lowtide.explain._frontier import FrontierPoint, frontier
from lowtide.explain._out_of_memory import Holding, OutOfMemory, holdings, out_of_memory
from lowtide.explain._peak import AliveStorage, Owner, Peak, peak
from lowtide.explain._plan import PlanExplanation, RegionChoice, Upgrade, explain_plan
from lowtide.explain._regions import Cause, Reason, RegionReplay, region_replays
from lowtide.explain._saved import SavedRow, SavedTable, SavedTwice, SharedStorage, saved_table
from lowtide.explain._step import StepView, is_inside
from lowtide.explain._where import PeakIn, described, peak_in

__all__ = [
    "Advice",
    "AdviceReport",
    "Alive",
    "AliveStorage",
    "Cause",
    "Explanation",
    "FrontierPoint",
    "Holder",
    "Holding",
    "OutOfMemory",
    "Owner",
    "Peak",
    "PeakIn",
    "PlanExplanation",
    "Reason",
    "RegionChoice",
    "RegionReplay",
    "Remedy",
    "SavedRow",
    "SavedTable",
    "SavedTwice",
    "SharedStorage",
    "StepView",
    "Upgrade",
    "advice",
    "described",
    "explain",
    "explain_plan",
    "frontier",
    "holdings",
    "is_inside",
    "out_of_memory",
    "peak",
    "peak_in",
    "region_replays",
    "saved_table",
    "why_alive",
]
