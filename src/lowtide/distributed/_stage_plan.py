"""The fastest replays that fit each stage of a pipeline.

All blocks of a stage are alike, so a plan is how many of them keep everything, how many replay attention's core, and how many are replayed
whole. Few enough are possible to try each: the plan is the exact optimum of the closed forms. Early stages of 1F1B have more micro-batches
in flight than late ones, so under one budget they replay more; a plan for all stages at once would make each as slow as the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lowtide.distributed._architecture import Architecture
from lowtide.distributed._estimate import Counts, Estimate, RankMemory
from lowtide.distributed._replay import Replays
from lowtide.distributed._setup import Setup
from lowtide.distributed._stages import Stage, stages
from lowtide.errors import InfeasibleBudgetError, InvalidInputError
from lowtide.units import format_bytes


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Replays of each stage.

    Attributes:
        budget_bytes: what a rank may hold.
        estimate: memory and arithmetic with the plan.
        uniform: the same with the best choice that is the same share of every stage; ``None`` where none fits.
    """

    budget_bytes: float
    estimate: Estimate
    uniform: Estimate | None


def plan_stages(model: Architecture, setup: Setup, budget_bytes: float) -> StagePlan:
    """Choose replays for every stage.

    Raises:
        InfeasibleBudgetError: a stage does not fit with everything replayed; says which, and what holds the memory.
        InvalidInputError: the budget is not above zero.
    """
    if budget_bytes <= 0:
        raise InvalidInputError(f"a budget is above zero bytes; found {budget_bytes}")
    counts = Counts(model, setup)
    split = stages(model, setup)
    chosen = tuple(_fastest(counts, stage, budget_bytes) for stage in split)
    return StagePlan(budget_bytes, Estimate(model, setup, "plan", chosen), _uniform(counts, split, budget_bytes))


def _choices(layers: int) -> Iterator[Replays]:
    """Every way to divide a stage; whole replays in groups of one: a longer group computes the same again and holds more at once."""
    for full in range(layers + 1):
        for selective in range(layers - full + 1):
            yield Replays(layers - full - selective, selective, full)


def _fastest(counts: Counts, stage: Stage, budget_bytes: float) -> RankMemory:
    ranks = [counts.rank(stage, replays) for replays in _choices(stage.layers)]
    fitting = [rank for rank in ranks if rank.peak_bytes <= budget_bytes]
    if fitting:
        return min(fitting, key=lambda rank: (rank.flops, rank.peak_bytes))
    raise _does_not_fit(min(ranks, key=lambda rank: rank.peak_bytes), budget_bytes)


def _does_not_fit(least: RankMemory, budget_bytes: float) -> InfeasibleBudgetError:
    parts = {
        "parameters": least.parameter_bytes,
        "gradients": least.gradient_bytes,
        "optimizer": least.optimizer_bytes,
        "activations": least.activation_bytes,
        "logits": least.logits_bytes,
        "temporaries": least.temporary_bytes,
    }
    told = ", ".join(f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]) if size)
    return InfeasibleBudgetError(
        f"stage {least.stage} needs {format_bytes(least.peak_bytes)} with as much replayed as helps, but a rank may hold "
        f"{format_bytes(budget_bytes)}: {told}. Split further (tp, pp), raise the ZeRO stage or dp, or take a smaller micro-batch",
        budget_bytes=int(budget_bytes),
        smallest_bytes=math.ceil(least.peak_bytes),
    )


def _uniform(counts: Counts, split: tuple[Stage, ...], budget_bytes: float) -> Estimate | None:
    """The best choice when every stage must do the same, as one setting for the whole model makes it."""
    smallest = min(stage.layers for stage in split)
    best: Estimate | None = None
    for replays in _choices(smallest):
        ranks = tuple(counts.rank(stage, _stretched(replays, stage.layers)) for stage in split)
        found = Estimate(counts.model, counts.setup, "uniform", ranks)
        if found.peak_bytes <= budget_bytes and (best is None or found.slowdown < best.slowdown):
            best = found
    return best


def _stretched(replays: Replays, layers: int) -> Replays:
    """The same for a stage with a block more, which is treated as thriftily as any."""
    more = layers - replays.layers
    if replays.full:
        return replace(replays, full=replays.full + more)
    return replace(replays, selective=replays.selective + more) if replays.selective else replace(replays, kept=replays.kept + more)
