"""1F1B with a plan for each stage, and with one plan for all stages, under one budget for each rank.

A plan is how many blocks a stage replays. The fewest that fit a stage are read from the trace of one micro-batch, rewritten by
``lowtide.distributed.in_pipeline``; one plan for all stages has to be what the stage in the greatest need takes. Both run under gloo, a
process a stage, in turns. The last stage has the head, so it is the slowest, and holds one micro-batch: it need not replay as the first
does.

    python benchmarks/stage_plans.py [--ranks 2] [--rounds 21]
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from _parallel import measured, peaks_of_rank
from rich.console import Console
from rich.table import Table

from lowtide.units import format_bytes, format_seconds

LAYERS = 3
"""Of a stage."""
SIZES = {"sequence": 256, "attention": "math", "batch": 1, "micro_batches": 6, "vocabulary": 1024, "returns_results": False}


def fewest(peaks: list[int], budget: int) -> int:
    """How many blocks a stage has to replay."""
    return next(count for count, peak in enumerate(peaks) if peak <= budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ranks = arguments.ranks
    asked: dict[str, Any] = {**SIZES, "layers": LAYERS * ranks}
    peaks = [peaks_of_rank(rank, ranks, asked, range(LAYERS + 1)) for rank in range(ranks)]
    budget = max(*(each[-1] for each in peaks), *(each[0] for each in peaks[1:]))
    own = [fewest(each, budget) for each in peaks]
    plans = {"one for all stages": [max(own)] * ranks, "one for each stage": own}
    [found] = measured(ranks, [[{**asked, "policy": plan} for plan in plans.values()]], [arguments.rounds])
    show(ranks, budget, plans, found)


def show(ranks: int, budget: int, plans: dict[str, list[int]], found: list[list[dict[str, Any]]]) -> None:
    """Both sides, and the ratio."""
    title = f"1F1B with {ranks} stages of {LAYERS} blocks, {format_bytes(budget)} a rank"
    table = Table("plan", "blocks replayed", "predicted to fit, measured peaks", "step", "processor of the slowest stage", title=title)
    medians = []
    for (name, plan), by_rank in zip(plans.items(), found, strict=True):
        step_s = [max(each) for each in zip(*(rank["seconds"] for rank in by_rank), strict=True)]
        processor_s = max(statistics.median(rank["processor_s"]) for rank in by_rank)
        medians.append((step_s, processor_s))
        peaks = "  ".join(format_bytes(int(rank["peak_bytes"])) for rank in by_rank)
        table.add_row(name, str(plan), peaks, format_seconds(statistics.median(step_s)), format_seconds(processor_s))
    (one_s, one_processor_s), (own_s, own_processor_s) = medians
    ratio = statistics.median(own / one for own, one in zip(own_s, one_s, strict=True))
    Console(width=130).print(
        table,
        f"\nA plan for each stage takes {ratio:.3f} of the time of one plan for all, the median of {len(own_s)} rounds in turns; "
        f"{own_processor_s / one_processor_s:.3f} of its processor time on the slowest stage.",
    )


if __name__ == "__main__":
    main()
