"""Regions that this step cannot have: their replay raises, or changes what the step computes.

Code can defeat a replay in ways that no trace shows: an argument that can be read once, a tensor that is written to after the module was
called. Plain autograd runs such a step, so a plan must leave those modules alone; which they are is found by trying each region by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lowtide.plan import Plan, PlannedRegion
from lowtide.plan.reading import without_function_calls
from lowtide.policy import apply
from lowtide.records import StepTrace
from lowtide.verify import Reference


def fails(model: nn.Module, plan: Plan, reference: Reference) -> bool:
    """Whether the step raises under a plan, or, should it repeat itself without one, computes something else."""
    handle = apply(model, plan)
    try:
        return not reference.compare().equal and reference.repeatable
    except Exception:
        return True
    finally:
        handle.remove()


def failing_regions(plan: Plan, plan_fails: Callable[[Plan], bool]) -> tuple[PlannedRegion, ...]:
    """The regions of a failing plan that fail by themselves; all of them, if none does."""
    alone = tuple(region for region in plan.regions if plan_fails(replace(plan, regions=(region,))))
    return alone or plan.regions


def without(trace: StepTrace, regions: tuple[PlannedRegion, ...]) -> StepTrace:
    """The trace with the modules of these regions marked as not to be replayed, and the functions among their members left out."""
    paths = {path for region in regions for path in region.paths}
    trace = without_function_calls(trace, paths)
    return replace(trace, calls=tuple(replace(call, replayable=False) if call.path in paths else call for call in trace.calls))
