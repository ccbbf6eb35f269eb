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
from lowtide.cli._outputs import form_of, refuse_other_forms, refuse_unwritable, write
from lowtide.cli._policies import Wanted, made_for, read_policies
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.errors import PlanError
from lowtide.measure import Comparison, measure
from lowtide.plan import Plan, PlannedRegion, simulate
from lowtide.policy import Handle, Policy, apply
from lowtide.records import StepTrace
from lowtide.report import BenchRow, Subject, bench_dict, bench_page, bench_png, bench_svg, bench_table
from lowtide.trace import trace
from lowtide.workload import Workload

_POLICIES = "Parted by commas: none, full, every:2, selective, plan:50% and others; `lowtide policies` lists them."
_DRAWN: dict[str, Callable[[tuple[BenchRow, ...], Subject], str | bytes]] = {".html": bench_page, ".png": bench_png, ".svg": bench_svg}


def bench(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    policies: Annotated[str, typer.Option(help=_POLICIES)] = "none,full,every:2,selective,plan:50%",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each policy that are timed.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Write time against memory: .svg, .png or .html.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows for machines on standard output.")] = False,
) -> None:
    """Measure peak and time of a step under several policies, each timed in turns with the plain step."""
    with reported():
        wanted = read_policies(policies)
        refuse_unwritable("--plot", plot)
        refuse_other_forms("--plot", plot)
        with output_kept_clean():
            rows, subject = _measured(target, wanted, steps)
        if plot is not None:
            write(plot, _DRAWN[form_of(plot)](rows, subject))
        if as_json:
            print(json.dumps(bench_dict(rows, subject), indent=2, allow_nan=False))
        else:
            Console().print(bench_table(rows, subject))


def _measured(target: str, policies: Wanted, steps: int) -> tuple[tuple[BenchRow, ...], Subject]:
    say = progress()
    say(f"loading {target}")
    with loaded(target) as workload:
        say("tracing a step")
        found = trace(workload.model, workload.step)
        made = {name: made_for(policy, found) for name, policy in policies.items()}
        rows = tuple(_row(name, policy, found, workload, steps, say) for name, policy in made.items())
    say("done")
    return rows, Subject(workload.name or target, workload.tokens_per_step)


def _row(name: str, policy: Policy | Plan, found: StepTrace, workload: Workload, steps: int, say: Callable[[str], None]) -> BenchRow:
    say(f"measuring {name}")
    predicted = _predicted(policy, found, workload)
    handle = apply(workload.model, policy)
    count = len(handle.regions)
    try:
        if not count:
            plain = measure(workload.model, workload.step, tokens=workload.tokens_per_step, steps=steps)
            return BenchRow(name, 0, predicted, plain, 1.0, 1.0)
        pair = _against_plain(handle, workload, steps)
    finally:
        handle.remove()
    return BenchRow(name, count, predicted, pair.step, pair.time_ratio, pair.peak_ratio)


def _predicted(policy: Policy | Plan, found: StepTrace, workload: Workload) -> int | None:
    """The simulated peak, where it is known what is kept, and that segments are replayed as one."""
    if isinstance(policy, Plan):
        return policy.predicted_peak_bytes
    if not policy.whole:
        return None
    try:
        return simulate(found, [PlannedRegion(region.paths) for region in policy.regions(workload.model)]).peak_bytes
    except PlanError:
        return None


def _against_plain(handle: Handle, workload: Workload, steps: int) -> Comparison:
    def plain() -> None:
        with handle.disabled():
            workload.step()

    return measure(workload.model, workload.step, tokens=workload.tokens_per_step, steps=steps, against=plain)
