"""Fit the bundled workloads into a row of budgets: predicted against measured, and what it costs.

A budget of 40 % allows 40 % of the activations that are alive at the un-checkpointed peak, and all else in full. The times without and
with the plan are taken in turns in one process; ``time`` is the median of their ratios pair by pair.

    python benchmarks/fit_budgets.py [--rounds 9] [--threads 1] [WORKLOAD ...]
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.table import Table

import lowtide
from lowtide.units import format_bytes
from lowtide.workloads import WORKLOADS, bundled

SHARES = (30, 40, 50, 60, 75)


def row(workload: lowtide.Workload, share: int, rounds: int) -> list[str]:
    try:
        result = lowtide.fit(workload.model, workload.step, f"{share}% of activations", rounds=rounds)
    except lowtide.InfeasibleBudgetError as error:
        return [
            f"{share} %",
            format_bytes(error.budget_bytes),
            f"none fits; the smallest budget that would: {format_bytes(error.smallest_bytes)}",
        ]
    result.handle.remove()
    return [
        f"{share} %",
        format_bytes(result.budget_bytes),
        format_bytes(result.predicted_peak_bytes),
        format_bytes(result.peak_bytes),
        f"{result.predicted_peak_bytes / result.peak_bytes:.4f}",
        "yes" if result.peak_bytes <= result.budget_bytes else "NO",
        f"{result.peak_bytes / result.plain.peak_bytes:.2f}",
        f"{result.step_ratio:.3f}",
        f"{result.after.planned_s / result.before.step_s:.3f}",
        "yes" if result.verified and result.verification.repeatable else "NO",
        str(len(result.plan.regions)),
    ]


def table_of(name: str, rounds: int) -> Table:
    workload = bundled(name)
    columns = (
        "budget",
        "bytes",
        "predicted",
        "measured",
        "pred/meas",
        "within",
        "peak/plain",
        "time/plain",
        "predicted",
        "bit for bit",
        "regions",
    )
    table = Table(*columns, title=name)
    for share in SHARES:
        table.add_row(*row(workload, share, rounds))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name in arguments.workloads:
        Console(width=160).print(table_of(name, arguments.rounds))


if __name__ == "__main__":
    main()
