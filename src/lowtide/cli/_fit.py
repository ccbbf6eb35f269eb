"""``lowtide fit``: a target into a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide import _fit
from lowtide.cli._failures import reported
from lowtide.cli._outputs import refuse_other_forms, refuse_unwritable, write_report
from lowtide.cli._streams import output_kept_clean, progress
from lowtide.cli._target import loaded
from lowtide.report import Subject, decided, fit_table, region_table, report_dict
from lowtide.units import parse_budget

TARGET = "gpt, resnet or unet, or path/to/script.py:function or package.module:function, where the function returns a lowtide.Workload."
_BUDGET = "The peak to allow: bytes (1.5GiB, 800MB), a share of the traced peak (50%), or auto: what the device has free."


def fit(
    target: Annotated[str, typer.Argument(help=TARGET, show_default=False)],
    budget: Annotated[str, typer.Option("--budget", "-b", help=_BUDGET, show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report for machines, and nothing else, on standard output.")] = False,
    plan: Annotated[Path | None, typer.Option(help="Write the plan to this file, for lowtide.apply.", show_default=False)] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the report: .html, or .svg for the timeline alone.", show_default=False)
    ] = None,
    decisions: Annotated[bool, typer.Option("--decisions", help="Print a second table: what was decided for each region.")] = False,
) -> None:
    """Find the fastest plan that keeps a training step's memory peak within a budget; measure and verify it."""
    with reported():
        parse_budget(budget)
        refuse_unwritable("--plan", plan)
        refuse_unwritable("--report", report)
        refuse_other_forms("--report", report)
        with output_kept_clean():
            result, subject = _fitted(target, budget)
        if plan is not None:
            result.plan.save(plan)
        if report is not None:
            write_report(report, result, subject)
        if as_json:
            print(json.dumps(report_dict(result, subject), indent=2, allow_nan=False))
            return
        Console().print(fit_table(result, subject))
        if decisions:
            Console().print(region_table(decided(result.trace, result.plan, result.after)))


def _fitted(target: str, budget: str) -> tuple[_fit.FitResult, Subject]:
    say = progress()
    say(f"loading {target}")
    with loaded(target) as workload:
        result = _fit.fit(workload.model, workload.step, budget, progress=say)
        result.handle.remove()
        say("done")
    return result, Subject(workload.name or target, workload.tokens_per_step)
