"""``lowtide bench``: policies measured side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli._failures import reported
from lowtide.cli._fit import TARGET
from lowtide.cli._outputs import refuse_unwritable, write_text
from lowtide.cli._policies import NONE, plan_for, read_policies
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.measure import Comparison, measure
from lowtide.plan import Plan
from lowtide.policy import apply
from lowtide.report import BenchRow, Subject, bench_dict, bench_page, bench_svg, bench_table
from lowtide.trace import trace
from lowtide.workload import Workload

_POLICIES = "Parted by commas: none, full (every block), every:N, sqrt, plan:BUDGET such as plan:50% or plan:1.5GiB."


def bench(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    policies: Annotated[str, typer.Option(help=_POLICIES)] = "none,full,every:2,sqrt,plan:50%",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each policy that are timed.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Write time against memory: .svg, or .html.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows for machines on standard output.")] = False,
) -> None:
    """Measure peak and time of a step under several policies, each timed in turns with the plain step."""
    with reported():
        wanted = read_policies(policies)
        refuse_unwritable("--plot", plot)
        with output_kept_clean():
            rows, subject = _measured(target, wanted, steps)
        if plot is not None:
            write_text(plot, bench_svg(rows, subject) if plot.suffix.lower() == ".svg" else bench_page(rows, subject))
        if as_json:
            print(json.dumps(bench_dict(rows, subject), indent=2, allow_nan=False))
        else:
            Console().print(bench_table(rows, subject))


def _measured(target: str, policies: tuple[str, ...], steps: int) -> tuple[tuple[BenchRow, ...], Subject]:
    say = progress()
    say(f"loading {target}")
    with loaded(target) as workload:
        say("tracing a step")
        found = trace(workload.model, workload.step)
        plans = [plan_for(policy, found) for policy in policies]
        rows = tuple(_row(policy, plan, workload, steps, say) for policy, plan in zip(policies, plans, strict=True))
    say("done")
    return rows, Subject(workload.name or target, workload.tokens_per_step)


def _row(policy: str, plan: Plan, workload: Workload, steps: int, say: Callable[[str], None]) -> BenchRow:
    say(f"measuring {policy}")
    if policy == NONE or not plan.regions:
        plain = measure(workload.model, workload.step, tokens=workload.tokens_per_step, steps=steps)
        return BenchRow(policy, 0, plan.predicted_peak_bytes, plain, 1.0, 1.0)
    pair = _against_plain(plan, workload, steps)
    return BenchRow(policy, len(plan.regions), plan.predicted_peak_bytes, pair.step, pair.time_ratio, pair.peak_ratio)


def _against_plain(plan: Plan, workload: Workload, steps: int) -> Comparison:
    handle = apply(workload.model, plan)

    def plain() -> None:
        with handle.disabled():
            workload.step()

    try:
        return measure(workload.model, workload.step, tokens=workload.tokens_per_step, steps=steps, against=plain)
    finally:
        handle.remove()
