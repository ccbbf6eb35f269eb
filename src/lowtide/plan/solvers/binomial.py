"""Binomial checkpointing (Griewank and Walther 2000, "Algorithm 799: revolve").

For l equal stages of which c inputs may be held at once, the first one's included, revolve runs the fewest stages forward that any
schedule can: with r the least number for which l <= C(c + r, c), they are ``(r + 1) * l - C(c + r, r - 1)``, each stage's own run for
backward included. It goes forward to a split point, holds the input there, deals with the stages after it and then, with what is held again
free, with those before it. As regions: the stages before the split are one, and inside it the same is done again.

This is the offline schedule, for a number of steps that is known beforehand. Online schedules (Wang, Moin and Iaccarino 2009; Stumm and
Walther 2010) place checkpoints while it is still open how many steps follow. A trace says how many stages there are, so that there
is nothing to decide online: the offline schedule does at most as many runs at every c.

Complexity: O(l) for a split, O(l**2) for a schedule at worst; one for each c up to l, or some of them where l is large. Known
shortcomings: stages are taken as equal in time and size; what is inside a stage is held whole when its backward comes.
"""

from __future__ import annotations

from functools import cache
from math import comb

from lowtide.plan._index import TraceIndex
from lowtide.plan._solution import PlannedRegion
from lowtide.plan.solvers._blocks import most_tried
from lowtide.plan.solvers._chain import Run, Schedule, chain_of

NAME = "binomial"
_MOST_RUNS = 4
"""Splits between one and two times as many: with fewer inputs held, a schedule of a long chain would run it dozens of times."""


def regions(index: TraceIndex) -> list[list[PlannedRegion]]:
    """One plan for each number of inputs that may be held.

    Raises:
        InvalidInputError: the step is no chain.
    """
    chain = chain_of(index, NAME)
    stages = len(chain.paths)
    return [chain.regions(schedule(stages, held)) for held in range(_fewest(stages), stages, 1 + stages // most_tried(stages))]


def _fewest(stages: int) -> int:
    """From here on no stage runs forward more often than a few times; all numbers, where the chain is short."""
    return next(c for c in range(1, stages + 1) if comb(c + _MOST_RUNS, c) >= stages)


def forward_runs(stages: int, held: int) -> int:
    """How many stages are run forward, counting each run of each stage, when ``held`` inputs beside the first may be held."""
    if not held:
        return stages * (stages + 1) // 2
    runs = 0
    while comb(held + 1 + runs, runs) < stages:
        runs += 1
    return (runs + 1) * stages - comb(held + 1 + runs, runs - 1) if runs else stages


def split(stages: int, held: int) -> int:
    """After how many stages to hold an input, when so many may be."""
    return min(range(1, stages), key=lambda k: (k + forward_runs(k, held) + forward_runs(stages - k, held - 1), -k))


def schedule(stages: int, held: int) -> Schedule:
    """Which stages are replayed together.

    Args:
        stages: how many there are.
        held: how many inputs beside the first may be held at once.
    """

    @cache
    def runs(length: int, left: int) -> Schedule:
        if length == 1:
            return ()
        k = split(length, left) if left else length - 1
        return (Run(0, k, runs(k, left)), *(_shifted(run, k) for run in runs(length - k, max(left - 1, 0))))

    return runs(stages, held)


def _shifted(run: Run, by: int) -> Run:
    return Run(run.start + by, run.stop + by, tuple(_shifted(inner, by) for inner in run.inside))
